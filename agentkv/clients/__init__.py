"""Clients of other libraries over a Runtime in this process, and this library's own over HTTP."""
