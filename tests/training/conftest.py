"""Fixtures that several tests of training share."""

from training_driver import zoo_data as zoo_data
