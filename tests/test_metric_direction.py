"""Whether a figure is better when higher is known, or said not to be."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

from lightning_lowrank.metric_direction import Monitor, by_name, direction, judged_by, monitors_of

HIGHER = (
    "val_acc acc Accuracy val/acc_epoch valAcc val_top5_acc test-accuracy val_f1 val_auroc val_mAP50 val_mIoU"
    " MulticlassAccuracy BinaryF1Score val_psnr val_r2 log_likelihood"
)
LOWER = (
    "val_loss valloss valLoss val_dice_loss val_ppl val_perplexity wer val_cer val_mae val_rmse MeanSquaredError"
    " val_error_epoch acc_error nll val_cross_entropy top1_err train_bce"
)
UNKNOWN = (
    "val_score val_recall_at_fpr95 neg_mean_squared_error negative_log_likelihood val_acc_std val_acc_drop lr epoch"
    " grad_norm num_errors x val_entropy"
)


@pytest.mark.parametrize(("names", "higher"), [(HIGHER, True), (LOWER, False), (UNKNOWN, None)])
def test_well_known_names(names, higher):
    assert {name: by_name(name) for name in names.split()} == dict.fromkeys(names.split(), higher)


def test_what_is_said_counts_in_order():
    watching = [Monitor("ModelCheckpoint", "personal/val_x_worst10", "min")]
    assert direction("val_x", monitors=watching) == (False, "")
    assert direction("val_x", True, watching) == (True, "")
    assert direction("val_y", monitors=watching)[0] is None
    found, why = direction("val_acc", monitors=[Monitor("EarlyStopping", "val_acc", "min")])
    assert found is None
    assert why == "lower is better by EarlyStopping(mode='min') and higher is better by its name"


@pytest.mark.parametrize(
    ("logged", "name"),
    [
        ("val_loss val_acc valid_acc", "val_acc"),
        ("valid_loss valid_accuracy", "valid_accuracy"),
        ("validation/acc validation/loss", "validation/acc"),
        ("valid_loss valid_score train_acc", "valid_loss"),
        ("valid_score valid_f1", "valid_f1"),
        ("valid_score train_acc", "valid_score"),
        ("val_acc/dataloader_idx_1 val_acc/dataloader_idx_0", "val_acc/dataloader_idx_0"),
        ("validity_acc personal/val_acc train_loss", None),
    ],
)
def test_a_run_is_judged_by_its_validation(logged, name):
    assert judged_by(logged.split(), None, []) == name
    assert judged_by([*logged.split(), "watched"], None, [Monitor("ModelCheckpoint", "watched", "min")]) == "watched"
    assert judged_by(logged.split(), "other", []) is None


def test_monitors_of_a_trainer():
    plateau = SimpleNamespace(monitor="val_z", scheduler=SimpleNamespace(mode="min"))
    callbacks = [ModelCheckpoint(monitor="val_x", mode="max"), EarlyStopping("val_y"), LearningRateMonitor()]
    trainer = SimpleNamespace(callbacks=[*callbacks, ModelCheckpoint()], lr_scheduler_configs=[plateau])
    assert [(each.name, each.mode) for each in monitors_of(trainer)] == [
        ("val_x", "max"),
        ("val_y", "min"),
        ("val_z", "min"),
    ]
