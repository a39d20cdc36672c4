"""Runs: processes on leased devices that a supervisor watches over. Imports no torch."""
