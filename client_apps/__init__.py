"""What runs on a client: its data, its model and its local training, behind a Flower ClientApp."""

from client_apps.app import make_client_app

__all__ = ["make_client_app"]
