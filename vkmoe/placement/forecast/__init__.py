"""This package describes devices that are not here, and bounds how fast a plan can be on one."""
