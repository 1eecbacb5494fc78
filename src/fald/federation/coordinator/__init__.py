"""What runs at the coordinator."""
