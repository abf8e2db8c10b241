"""A real nginx in the place of the ingress controller and of the Service: its routes and annotations are the rendered
Ingress's, its endpoints the pods that are ready and not terminating."""

import os
import subprocess
import threading
from pathlib import Path

from tests.chart.rendering import Manifest

_PREFIX = "nginx.ingress.kubernetes.io/"
# ingress-nginx's annotations, as the directives that it writes for them; the others have the same name.
_DIRECTIVES = {"proxy-body-size": "client_max_body_size"}


class NginxIngress:
    """Owns the nginx process. `route` may be called from any thread."""

    def __init__(self, ingress: Manifest, folder: Path, listen: list[str]) -> None:
        self._ingress = ingress
        self._folder = folder
        self._listen = listen
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        # Workers run as another user.
        for parent in (folder, *folder.parents):
            if parent != Path("/") and os.stat(parent).st_uid == os.getuid():
                parent.chmod(parent.stat().st_mode | 0o055)

    def route(self, endpoints: list[str]) -> None:
        """Send traffic to these addresses from now on; what runs, runs on."""
        with self._lock:
            (self._folder / "nginx.conf").write_text(self._configuration(endpoints))
            command = ["nginx", "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]
            if self._process is None:
                self._process = subprocess.Popen([*command, "-g", "daemon off;"])
            else:
                subprocess.run([*command, "-s", "reload"], check=True, capture_output=True)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.terminate()
                self._process.wait(10)
                self._process = None

    def _configuration(self, endpoints: list[str]) -> str:
        annotations = self._ingress["metadata"]["annotations"]
        directives = [
            f"{_DIRECTIVES.get(name, name.replace('-', '_'))} {value};"
            for name, value in ((name.removeprefix(_PREFIX), value) for name, value in annotations.items())
        ]
        (rule,) = self._ingress["spec"]["rules"]
        to = "proxy_pass http://frontends;" if endpoints else "return 503;"
        locations = "\n".join(f"location {path['path']} {{ {to} }}" for path in rule["http"]["paths"])
        servers = "\n".join(f"server {endpoint};" for endpoint in endpoints)
        upstream = f"upstream frontends {{ least_conn;\n{servers}\nkeepalive 64; }}" if endpoints else ""
        return f"""
pid {self._folder}/nginx.pid;
error_log {self._folder}/error.log;
worker_processes 1;
events {{ worker_connections 2048; }}
http {{
access_log off;
client_body_temp_path {self._folder}/body;
proxy_temp_path {self._folder}/proxy;
fastcgi_temp_path {self._folder}/fastcgi;
uwsgi_temp_path {self._folder}/uwsgi;
scgi_temp_path {self._folder}/scgi;
{upstream}
server {{
{" ".join(f"listen {address};" for address in self._listen)}
proxy_set_header Connection "";
{chr(10).join(directives)}
{locations}
location / {{ return 404; }}
}}
}}
"""
