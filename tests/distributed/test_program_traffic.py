"""Memory traffic read from programs, and of programs whose traffic follows from their shapes."""

import jax
import jax.numpy as jnp

from transformer_jax.distributed.program_traffic import Traffic, program_traffic

# 5 trips of a loop that reads a row of a stack (8 floats), multiplies it, and writes it to another stack.
PROGRAM = """HloModule step

%read_row (stack: f32[5,8], i: s32[]) -> f32[8] {
  %stack = f32[5,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%row)
}

%write_row (stack: f32[5,8], row: f32[8], i: s32[]) -> f32[5,8] {
  %stack = f32[5,8]{1,0} parameter(0)
  %row = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  %wide = f32[1,8]{1,0} bitcast(%row)
  ROOT %new = f32[5,8]{1,0} dynamic-update-slice(%stack, %wide, %i, %i)
}

%body (p: (s32[], f32[5,8], f32[5,8], bf16[8,8])) -> (s32[], f32[5,8], f32[5,8], bf16[8,8]) {
  %p = (s32[], f32[5,8], f32[5,8], bf16[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %from = f32[5,8]{1,0} get-tuple-element(%p), index=1
  %to = f32[5,8]{1,0} get-tuple-element(%p), index=2
  %weight = bf16[8,8]{1,0} get-tuple-element(%p), index=3
  %row = f32[8]{0} fusion(%from, %i), kind=kLoop, calls=%read_row
  %near = f32[8]{0:S(1)} copy(%row)
  %product = f32[8]{0} dot(%near, %weight), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %written = f32[5,8]{1,0} fusion(%to, %product, %i), kind=kLoop, calls=%write_row
  ROOT %next = (s32[], f32[5,8], f32[5,8], bf16[8,8]) tuple(%i, %from, %written, %weight)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %loop = (s32[], f32[5,8], f32[5,8], bf16[8,8]) while(%t), body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %sum = f32[4]{0} add(%a, %a)
}
"""


def test_traffic_of_a_program():
    # The slice reads a row and an index, and writes a row. The copy reads a row, which stays near. The
    # product reads the weight and writes a row. The update reads a row and an index, and writes a row.
    row = 4 * 8
    elementwise = 5 * ((row + 4 + row) + row + (row + 4 + row)) + 3 * 16
    assert program_traffic(PROGRAM) == Traffic(5 * (128 + row), elementwise)


def test_traffic_of_a_compiled_loop_follows_its_trips():
    def step(weights, x):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    def traffic(layers):
        shapes = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
        return program_traffic(jax.jit(step).lower(*shapes).compile().as_text())

    per_layer = (traffic(9).total - traffic(5).total) / 4
    minimum = 4 * (64 * 64 + 2 * 8 * 64)  # the weight, the input and the output
    assert minimum <= per_layer < 3 * minimum
