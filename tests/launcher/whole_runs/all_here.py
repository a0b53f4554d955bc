"""A run placed over hosts of these names, all of which are this machine: python all_here.py CONFIG.json HOST,..."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from launcher.launched import launch_placed

from asyncrl.config.load import validate_config
from asyncrl.launcher.terms.placement import PlacementHost, place, with_episode_hosts, with_gpus


def main() -> int:
    tree, names = sys.argv[1:]
    hosts = [PlacementHost(name=name, cpus=2) for name in names.split(",")]
    config = with_episode_hosts(with_gpus(validate_config(json.loads(Path(tree).read_text())), hosts), hosts)
    return launch_placed(config, place(config, hosts))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
