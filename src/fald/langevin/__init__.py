"""Federated averaging Langevin dynamics: clients, server, method, engine, loop."""
