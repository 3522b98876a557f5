"""Tools for operators: profiles, simulation and sizing. Nothing that serves imports them."""
