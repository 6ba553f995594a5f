import pytest
import torch

from fullstride.meanflow.bench_step_profile import TOP, group_of, profiled, summary

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
        ("aten::addmm", "matmul"),
        ("aten::mul", "pointwise"),
        ("aten::promote_types", "other"),
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


def test_a_products_time_is_seen():
    a = torch.randn(200, 200)
    found = profiled(lambda: a @ a, CPU)
    assert found["groups"]["matmul"] > 0.5 * found["ms"] > 0
    assert found["kernels"][0]["launches"] == 1
