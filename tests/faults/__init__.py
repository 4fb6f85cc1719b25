"""What happens when: every row of the table in docs/faults.md, produced."""
