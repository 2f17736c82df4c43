from veriformer.properties import Subject

PEAK, FLOOR = 3e-3, 6e-4
WARMUP, TOTAL = 20, 200


def get_lr(step):
    """Linear warm-up, then a linear decay to FLOOR at step TOTAL."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    frac = min(1.0, (step - WARMUP) / (TOTAL - WARMUP))
    return FLOOR + (PEAK - FLOOR) * (1.0 - frac)


subject = Subject(
    kind="schedule",
    name="linear schedule",
    forward=lambda model, step: get_lr(step),
    declares={
        "schedule": "linear",
        "peak": PEAK,
        "floor": FLOOR,
        "warmup_steps": WARMUP,
        "total_steps": TOTAL,
        "first_step": 0,
    },
)
