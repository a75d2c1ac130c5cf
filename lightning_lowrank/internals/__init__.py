"""All use of private parts of torch, Lightning and Flower, one module for each library and purpose.

Everything else in the package uses public names. `torch` imports torch alone, so that the packages that do without
Lightning can use it. `lightning` has what rounds need of the trainer, `direct_steps` the fast steps, `cli` what the
command line needs of ``LightningCLI``, `flower` what the bridge to Flower needs.

The docstrings tell what happens where a library has no such part: a public way that gives the same results more slowly,
or an error that names the version. The tests in ``tests/internals`` fail when a part changes or
when a private name is used elsewhere.
"""
