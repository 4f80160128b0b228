"""What the transfer role gives pip, so that it finds the index and is let in: as role vllm does for its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: transfer
        tasks_from: present
      when: false
    - control_file:
        path: "{{ playbook_dir }}/environment.json"
        content: "{{ __transfer_swarm_pip_environment | to_json }}"
"""


def environment(folder: Path, **variables: str) -> tuple[dict | None, str]:
    """(pip's environment, or None where Ansible refused, what it printed)."""
    (folder / "play.yml").write_text(PLAY)
    done = subprocess.run(
        [
            "ansible-playbook",
            "-i",
            "localhost,",
            "-c",
            "local",
            str(folder / "play.yml"),
            "-e",
            json.dumps(variables),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    path = folder / "environment.json"
    return json.loads(path.read_text()) if path.exists() else None, done.stdout + done.stderr


INDEX = {"vllm_index_url": "https://packages.example.com/simple"}
LOGIN = {"vllm_index_username": "me", "vllm_index_password": "s3cr:t/"}


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, None),
        (INDEX, "https://packages.example.com/simple"),
        (INDEX | LOGIN, "https://me:s3cr%3At%2F@packages.example.com/simple"),
        (INDEX | {"vllm_index_password": "token"}, "https://:token@packages.example.com/simple"),
        (INDEX | LOGIN | {"vllm_wheelhouse": "/srv/wheels"}, None),
    ],
)
def test_the_index(tmp_path, variables, url):
    found, output = environment(tmp_path, **variables)
    assert found is not None, output
    assert found.get("PIP_INDEX_URL") == url
    assert found["PIP_CONFIG_FILE"] == "/dev/null"


def test_a_login_in_the_url_is_refused(tmp_path):
    found, output = environment(tmp_path, vllm_index_url="https://me:pw@packages.example.com/simple")
    assert found is None
    assert "vllm_index_password" in " ".join(output.split())
