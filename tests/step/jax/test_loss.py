import jax
import jax.numpy as jnp
import numpy as np

from fullstride.step.jax.loss import accumulated, describe


def test_short_numbers_are_added_up_in_fp32():
    # A sum of 256 ones in bf16, the 257th of which would be lost.
    def objective(params, batch, key, state):
        loss = (params * batch[0].astype(params.dtype)).sum()
        return loss, loss.astype("float32"), {"rows": jnp.asarray(1)}, state

    ones = np.ones((512, 1), "f")
    grads, loss, aux, _ = jax.jit(lambda p: accumulated(objective, 512, p, ones, None))(jnp.ones(1, "bfloat16"))
    assert grads.dtype == jnp.bfloat16
    assert (float(grads[0]), float(loss), int(aux["rows"])) == (1.0, 1.0, 512)


def test_aux_of_samples_is_joined_over_the_micro_batches_element_by_element():
    def objective(params, batch, key, state):
        aux = {"value": batch, "above": (batch > 2).astype("int32"), "any": batch > 6, "place": jnp.arange(2)}
        return (params * batch).sum(), batch.sum(), aux, state

    batch = np.arange(8, dtype="f")
    _, _, aux, _ = jax.jit(lambda p: accumulated(objective, 4, p, batch, None))(jnp.ones(()))
    np.testing.assert_array_equal(aux["value"], [1.5, 5.5])  # of the samples 0 to 3 and 4 to 7
    np.testing.assert_array_equal(aux["above"], [1, 4])
    np.testing.assert_array_equal(aux["any"], [False, True])
    np.testing.assert_array_equal(aux["place"], [0, 4])


def test_descriptions():
    assert describe(np.zeros((2, 3), "int8")) == "int8[2,3]"
    assert describe({}) == "a dict"
