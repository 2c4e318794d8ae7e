"""Opens the place that an operator names."""

from __future__ import annotations

import dataclasses
import os
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from safe_offload.commands.cache.place import Place
from safe_offload.config.printing import printable, without_secrets
from safe_offload.config.settings import problem_of_path
from safe_offload.config.tier_list import tiers
from safe_offload.config.tier_url import FILE, URL_KEY
from safe_offload.config.tiers import TierConfig
from safe_offload.errors import ConfigError
from safe_offload.tiers.choice import open_store

TIMEOUT_S: Final = 30.0
"""Of each answer."""
OPTIONS: Final = {
    "--password-file": "password_file",
    "--ca-file": "ca_file",
    "--cert-file": "cert_file",
    "--key-file": "key_file",
    "--endpoint": "endpoint",
    "--hmac-key-file": "hmac_key_file",
    "--encryption-key-file": "encryption_key_file",
}
"""Options, and the settings of a tier that they set."""


def add_options(parser: ArgumentParser) -> None:
    """Add the options to reach a tier."""
    for option, setting in OPTIONS.items():
        metavar = setting.rpartition("_")[2].upper()
        parser.add_argument(option, metavar=metavar, help=f'as the tier\'s "{setting}"')


def config_of(place: str, options: Mapping[str, Any]) -> TierConfig:
    """Return the tier at a url, or in the directory of a path; None is an option not given."""
    path, url = os.path.abspath(place), place
    if "://" not in place:
        if problem := problem_of_path(path):
            label = printable(without_secrets(place))
            raise ConfigError(f"{label}: {problem}. Fix: name the directory or the url of a tier.")
        url = f"{FILE}://{quote(path)}"
    written = {
        name: os.path.abspath(value) if name.endswith("_file") else value
        for name, value in options.items()
        if value is not None
    }
    config: TierConfig = tiers().read("tiers", [{URL_KEY: url, **written}])[0]
    return config


def open_place(place: str, config: TierConfig) -> Place:
    """Return the place of a tier."""
    location = config.location
    label = location.label
    if location.scheme == FILE:
        label = without_secrets(location.path if "://" in place else place)
    return Place(open_store(dataclasses.replace(config, timeout_s=TIMEOUT_S)), label)
