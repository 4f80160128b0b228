"""What the modules do: pure functions, standard library only, no Ansible inside."""
