"""What Home Assistant is told, so that it shows the board by itself: one retained message for each sensor. Pure.

The form is that of Home Assistant's MQTT discovery (home-assistant.io/integrations/mqtt). Each sensor reads the status
or the telemetry message; the status topic tells whether the board is there.
"""

import re
from collections.abc import Iterator
from typing import Any

_SENSORS: dict[str, dict[str, Any]] = {
    "state": {
        "name": "State",
        "value_template": "{{ value_json.state }}",
        "device_class": "enum",
        "options": ["idle", "busy", "stopping", "offline"],
        "icon": "mdi:chat-processing",
    },
    "memory": {
        "name": "Memory",
        "value_template": "{{ (value_json.memory.rss / 1000000) | round(1) }}",
        "device_class": "data_size",
        "unit_of_measurement": "MB",
        "state_class": "measurement",
        "entity_category": "diagnostic",
    },
    "speed": {
        "name": "Speed",
        "value_template": "{{ value_json.tokens_per_s }}",
        "unit_of_measurement": "tokens/s",
        "state_class": "measurement",
        "icon": "mdi:speedometer",
    },
    "temperature": {
        "name": "Temperature",
        "value_template": "{{ value_json.temperature_c }}",
        "device_class": "temperature",
        "unit_of_measurement": "°C",
        "state_class": "measurement",
        "entity_category": "diagnostic",
    },
}
_FROM_STATUS = ("state",)


def announcements(
    prefix: str, node: str, model: str, version: str, topics: dict[str, str], temperature: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topic and message for each sensor. `topics` names those of `status` and `telemetry`; `temperature` is whether the
    board has a reading of it."""
    device_id = "skerry_" + re.sub(r"[^A-Za-z0-9_-]", "_", node)
    common = {
        "availability_topic": topics["status"],
        "availability_template": "{{ 'offline' if value_json.state == 'offline' else 'online' }}",
        "device": {"identifiers": [device_id], "name": node, "manufacturer": "Skerry", "model": model},
        "origin": {"name": "skerry", "sw_version": version},
    }
    for key, sensor in _SENSORS.items():
        if key != "temperature" or temperature:
            yield (
                f"{prefix}/sensor/{device_id}/{key}/config",
                {
                    **sensor,
                    "unique_id": f"{device_id}_{key}",
                    "state_topic": topics["status" if key in _FROM_STATUS else "telemetry"],
                    **common,
                },
            )
