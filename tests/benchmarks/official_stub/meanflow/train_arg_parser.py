import argparse

NUMBERS = ("lr", "dropout", "ema_decay", "ratio", "P_mean_t", "P_std_t", "P_mean_r", "P_std_r", "norm_p", "norm_eps")


def get_args_parser():
    parser = argparse.ArgumentParser(add_help=False)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=float)
    for name in ("batch_size", "seed", "log_per_step"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tr_sampler", "device"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--arch", default="unet")
    return parser
