"""The methods CRAFT, FedRef and CLAIR are judged against."""
