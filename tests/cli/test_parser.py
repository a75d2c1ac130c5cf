"""What is done to a configuration before anything is built."""

import pytest
from jsonargparse import Namespace

from lightning_lowrank.cli.parser import _write_below_root


@pytest.mark.parametrize(
    ("root", "folder", "written"),
    [
        (None, "runs", "runs"),
        ("there", "runs", "there/runs"),
        ("/there", "runs", "/there/runs"),
        ("there", "there/runs", "there/runs"),
        ("there", "/else/runs", "/else/runs"),
        ("there", "s3://runs", "s3://runs"),
        ("there", None, None),
    ],
)
def test_a_root_folder_holds_the_relative_folders(root, folder, written):
    def writing(argument, folder):
        return Namespace(class_path="Any", init_args=Namespace({argument: folder}))

    for several in (False, True):
        logger = writing("save_dir", folder)
        trainer = Namespace(
            default_root_dir=root,
            logger=[logger] if several else logger,
            callbacks=[Namespace(class_path="Bare"), writing("dirpath", folder)],
        )
        _write_below_root(trainer)
        assert logger.init_args.save_dir == written
        assert trainer.callbacks[1].init_args.dirpath == written
    for without in (True, None):
        _write_below_root(Namespace(default_root_dir="there", logger=without, callbacks=without and None))
