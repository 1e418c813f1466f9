"""Ports for servers in other processes."""

import socket


def reserve_port() -> socket.socket:
    """Return a bound socket. The system assigns its port to no other process while it is open.

    A server that sets SO_REUSEADDR can listen on the port, and otherwise connections to it are refused.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def port_of(reserved: socket.socket) -> int:
    port: int = reserved.getsockname()[1]
    return port
