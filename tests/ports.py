"""Free ports."""

import socket


def free_ports(number: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct free ports; the host "" means all addresses of this machine."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind((host, 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
