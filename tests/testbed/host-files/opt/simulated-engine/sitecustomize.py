"""Simulated engine, the way in: replaces what `vllm serve` does after parsing, and nothing else.

Python imports a `sitecustomize` that it finds on PYTHONPATH at every start. A finder waits for the one module
whose command is to be replaced; a Python that never imports it pays for this file alone.
"""

import sys

TARGET = "vllm.entrypoints.cli.serve"


class _Finder:
    """Lets the other finders find the module, then replaces ServeSubcommand.cmd once it is executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(_Finder)
        from importlib.util import find_spec

        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)

            def cmd(args):
                import simulated_engine

                simulated_engine.serve(args)

            module.ServeSubcommand.cmd = staticmethod(cmd)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
