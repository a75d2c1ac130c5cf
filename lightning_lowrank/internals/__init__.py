"""All uses of private parts of torch, Lightning and other libraries, one module per library and purpose.

Everything else in the package uses public names. `torch` imports torch alone, so that the packages that do without
Lightning can use it. `lightning` has what rounds need of the trainer, `advance` the loop of turns, `replaced` the one
way to replace attributes for a while, `cli` what the command line needs of ``LightningCLI``, `flower` what the bridge
to Flower needs, `transformers` a patch for mapped steps, and `peft` what is known of PEFT's layers.

The versions that ``pyproject.toml`` admits have all of these parts. The tests in ``tests/internals`` fail when a part
changes or when a private name is used elsewhere.
"""
