"""The same command line on other machines: processes here, torchrun, Slurm, Modal, SkyPilot."""
