"""The data sets by name, as `data=fashion_mnist`."""

from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.meanflow.config import DataConfig
from fullstride.meanflow.data.dataset import Dataset
