"""moto's S3 on loopback, or at the address that it is given. One request at a time, so that a conditional PUT is one
action, as it is in S3 itself."""

from __future__ import annotations

import sys

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1"
    server = make_server(address, 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    print(server.server_port, flush=True)
    server.serve_forever()
