"""Launchers of one command line on other machines: local processes, torchrun, Slurm, Modal, SkyPilot."""
