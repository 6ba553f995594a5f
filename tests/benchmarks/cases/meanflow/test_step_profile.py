import pytest
import torch

from benchmarks.cases.meanflow.step_profile import profiled
from benchmarks.harness import kernel_groups
from benchmarks.harness.kernel_groups import TOP, group_of, summary
from fullstride.jvp import ada_layer_norm, attention, group_norm, jvp, layer_norm, rms_norm

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float>", "convolution"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matmul"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", "matmul"),
        ("forward_kernel", "norm"),
        ("gradients_kernel", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "norm"),
        ("triton_red_fused_native_group_norm_3", "norm"),
        ("dual_forward", "attention"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("lerp_kernel", "optimizer"),
        ("triton_poi_fused_add_mul_silu_12", "pointwise"),
        ("void at::native::elementwise_kernel<128, 2, at::native::mul>", "pointwise"),
        ("Memcpy DtoD (Device -> Device)", "pointwise"),
        ("group_norm", "norm"),
        ("rms_norm_backward", "norm"),
        ("ada_layer_normBackward", "norm"),
        ("attention", "attention"),
        ("attention_varlen_backward", "attention"),
        ("fullstride::attention", "attention"),
        ("aten::addmm", "matmul"),
        ("aten::mul", "pointwise"),
        ("aten::silu_backward", "pointwise"),
        ("aten::expand", "other"),
        ("aten::promote_types", "other"),
        ("aten::normal_", "other"),
        ("loop_convert_fusion_7", "pointwise"),
        ("input_scatter_fusion", "pointwise"),
        ("gemm_fusion_dot_12", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("distribution_elementwise_grid_stride_kernel<float, 4, at::native::templates::cuda::normal_and_", "pointwise"),
    ],
)
def test_kernels_are_grouped_by_what_they_do(kernel, group):
    assert group_of(kernel) == group


def test_a_summary_adds_up_and_keeps_the_longest():
    kernels = [(f"nvjet_{i}", float(i), 2.0) for i in range(30)] + [("forward_kernel", 7.5, 1.0)]
    found = summary(kernels)
    assert found["groups"]["matmul"] == sum(range(30))
    assert found["groups"]["norm"] == 7.5
    assert found["ms"] == sum(range(30)) + 7.5
    assert found["launches"] == 61
    assert [k["ms"] for k in found["kernels"]] == sorted((ms for _, ms, _ in kernels), reverse=True)[:TOP]


@pytest.fixture
def every_kernel(monkeypatch):
    monkeypatch.setattr(kernel_groups, "TOP", None)


def launches(found, *groups):
    return {k["name"]: k["launches"] for k in found["kernels"] if k["group"] in groups}


@pytest.mark.usefixtures("every_kernel")
def test_a_products_time_is_seen():
    a = torch.randn(200, 200)
    found = profiled(lambda: a @ a, CPU)
    assert 0 < found["groups"]["matmul"] <= found["ms"]
    assert launches(found, "matmul")["aten::mm"] == 1


DUAL = {
    "norm": [
        lambda x: group_norm(x, 8),
        lambda x: layer_norm(x, x.new_ones(x.shape[-1])),
        lambda x: rms_norm(x, x.new_ones(x.shape[-1])),
        lambda x: ada_layer_norm(x, x.new_ones(len(x), x.shape[-1]), x.new_ones(len(x), x.shape[-1])),
    ],
    "attention": [lambda x: attention(x, x, x)],
}


# Other work of the call below.
AROUND = {"clone", "copy_", "to", "_to_copy", "sum", "add", "add_", "fill_", "zero_", "zeros"}


@pytest.mark.usefixtures("every_kernel")
@pytest.mark.parametrize(("group", "run"), [(group, run) for group, runs in DUAL.items() for run in runs])
@pytest.mark.parametrize("of_tangent", [False, True])
def test_on_a_processor_a_dual_op_has_the_time_of_what_it_is_made_of(group, run, of_tangent):
    x, tangent = (torch.randn(2, 16, 48, 64) for _ in range(2))

    def call():
        given = x.clone().requires_grad_()
        out, moved = jvp(run, (given,), (tangent,), tangent_grad=of_tangent)
        (out + moved if of_tangent else out).sum().backward()

    found = profiled(call, CPU)
    other = "attention" if group == "norm" else "norm"
    assert 0 < found["groups"][group] <= found["ms"]
    assert list(launches(found, group).values()) == [1, 1]  # forward and backward
    assert found["groups"][other] == found["groups"]["matmul"] == 0
    assert {name.removeprefix("aten::") for name in launches(found, "pointwise")} <= AROUND


def test_on_a_processor_a_models_products_are_no_part_of_its_attention():
    x, w = torch.randn(2, 4, 32, 64), torch.randn(64, 64, requires_grad=True)

    def call():
        out, _ = jvp(lambda x: attention(x @ w, x, x) @ w, (x,), (torch.randn_like(x),))
        out.sum().backward()

    found = profiled(call, CPU)
    assert min(found["groups"]["matmul"], found["groups"]["attention"]) > 0
    assert found["launches"] >= found["kernels"][0]["launches"] >= 1
