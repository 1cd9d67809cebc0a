"""Clients of other libraries over a Runtime in this process, and this library's own over HTTP."""

from .openai_client import openai_client
from .remote import RemoteRuntime, RemoteSession, RemoteStream, connect

__all__ = ["RemoteRuntime", "RemoteSession", "RemoteStream", "connect", "openai_client"]
