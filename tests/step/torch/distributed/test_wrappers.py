def test_wrapped_models_and_weights_over_processes_end_as_one_process(forked, tmp_path):
    store = str(tmp_path / "store")
    for done in forked(*(["tests.step.torch.distributed.wrapped", str(rank), store] for rank in (0, 1))):
        assert done.returncode == 0, done.stdout + done.stderr
