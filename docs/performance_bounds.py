"""What bounds the decode chain's kernels: a section of the performance page, in Markdown."""

from __future__ import annotations

DECODE_CHAIN_BOUNDS = """\
### What bounds a layer

A few words: FC1 and FC2 are the kernels of an expert's two products. An item is an expert with up to 4 of the tokens
that chose it; of one token every choice is an item. A unit is 16 weight rows of an item in FC1, and in FC2 8 rows of
each of two (nvfp4), with all of their reduction. A group is what a warp asks for at once, 128 bytes of each of 16 rows,
two steps of its reduction; two groups are on their way.

The times of this part are those of both kernels together, without the router, on nvfp4 512/10/2560/640 behind a kernel
that writes the choices in 1.3 us, which is counted: 17.3, 29.0 to 30.0 and 46.6 us at 1, 2 and 4 tokens. Marks of the
global timer in the kernels, which cost 2 to 3 us themselves, say of the median block (what they leave of the times is
not accounted for):

- At 1 token FC1 has the choices 0.5 us after it may go on, waits for its first weights until 1.9 and multiplies until
  6.8: 18.4 MB at 3.8 TB/s. A block has 6 units of 23 KB, but 8 of the 132 blocks have 7, and those end 1.1 us behind
  the others. FC2 may go on 1.7 us after the last block of FC1, has its activations 1.0 us later, multiplies for 2.8 us
  what has long arrived, and finishes in 0.7.
- At 4 tokens FC1 multiplies for 17.5 us at the speed of memory, 73.7 MB at 4.2 TB/s, and FC2 for 10. Finding the items
  takes 1.5 us, the first weights 1.3, a unit that some blocks have more than others 2.5, the edge between the kernels
  with FC2's activations 6, and the end 1.5.
- Eight weights of nvfp4 become float16 in 11 instructions, 7 of which are logical ones or shifts, which a
  multiprocessor issues at half the rate. A step, 2048 weights, is 127 instructions of a warp and some 40 for the
  copies. At 1 token FC1 executes 3.8 million instructions and FC2 3.0 million: 3.6 and 2.9 us if each of the 528
  schedulers issued one a cycle, and they issue two in three cycles.

This is how it came from 20.6, 31.8 and 55.2 us: one warp finds the items, and of one token each warp reads the choices
for itself (0.9 us at 1 token); activations pass through registers alone on their way to shared memory (0.3); a block
takes every 132nd unit, for those of an expert with several tokens take longer (5 us at 4 tokens, 15 by Zipf's law);
warps that share a unit finish it, and no longer the whole block all of its units (1 us at 4 tokens); in FC2 the tensor
core's 16 rows are 8 rows in two steps of the reduction, or in one step of two experts (0.6 us, and 3 at 4 tokens; 4
tokens of nvfp4 128/8/2048/768 40.5 to 35.9); and addresses and divisions are worked out ahead of the wait for the
kernel before (1.2 us): the assembler had put the wait first, until it was given a condition that needs them.

Other designs, in us at 1 / 4 tokens, each beside what the kernels took when it was tried (small blocks, and one kernel,
by another measure, with the router), and the bytes alone:

| design | it took | beside |
|---|---|---|
| rows in bulk copies that one warp asks for: each costs 65 to 80 ns, however small | 38.6 / 98.5 | 20.1 / 53.5 |
| units in four bulk copies, cut into steps for 16 warps | 23.9 / 65.1 | 20.1 / 53.5 |
| the same, each warp with its part of the reduction in all units | 23.6 / 78.0 | 20.1 / 53.5 |
| the same, 8 rows in two steps, by 20 warps in FC1 | 21.4 / 76.4 | 20.1 / 53.5 |
| all of a block's weights on their way at once: the first arrive as late as the last | 22.3 / - | 20.6 / 55.2 |
| 8 warps in each kernel, so that both fit on a multiprocessor | 19.8 / 55.0 | 19.1 / 49.7 |
| the reductions of 8 units cut into equal shares for the warps, with more sums to add | 23.0 / 54.2 | 17.3 / 46.2 |
| three groups of a warp's weights on their way in FC1 in place of two | 18.3 / 47.2 | 17.4 / 46.4 |
| many small blocks that scale each weight before the product | 23.7 / 80.8 | 22.4 / 57.7 |
| FC1 and FC2 in one kernel, whose blocks meet by flags between them | 23.1 / 62.6 | 22.4 / 57.7 |
| (two kernels in the same grids that bring the same bytes and multiply nothing) | 10.9 / - | 20.6 / 55.2 |

Weights that leave the L2 first, copies that bring 256 bytes into the L2, FC2's weights brought into the L2 by FC1, and
FC2's first products prepared ahead of its wait: no difference. Nor did it make one that FC2's first group of weights no
longer waits for the second.

The other packed formats take the same kernels. Their weights go to the tensor core as exact codes in float16, and the
sums of a block are scaled: at 1 and 4 tokens of mxfp4 32/4/2880/2880 that takes 31 and 81 us with the router, where the
grouped product on wgmma takes 71 and 143 without it; 20 and 53 of int4/32 512/10/2560/640 (53 and 100); 20 and 49 of
int8/128 128/8/2048/768 (64 and 113); 19 and 49 of fp8/128 128/8/2048/768 (49 and 91). A second chain of products in
flight in each warp made no difference.

FC2 has two experts to a warp's 16 rows of packed weights, and one where there is a single choice; of dense weights
four, which shares out 2560 columns better, but two or one where there are no more choices. With four in each, a layer
that chooses two or one read and decoded some rows twice or four times: int4/32 8/2/4096/14336 took 88 us at 1 token,
now 67; 16/1/5120/8192 53 in int4 and 92 in dense weights, now 31 and 69 to 77; with two, 50 in int8, 38 in mxfp4 and 32
in nvfp4, now 42, 30 and 29. With several tokens FC1 of int4 kept up to 64 bytes of a thread in local memory, now up to
16. A tile of packed weights keeps the address of its first row alone, weights are decoded a vector at a time, and two
tokens of an expert have code of their own: 4 tokens of int4/32 512/10/2560/640 took 61 us, now 53, of 128/8/2048/768
48, now 39. Two slices of a reduction of 12 groups and more in place of four took 4 % longer at 1 token, and made no
difference at 2.

With more than 60 choices of nvfp4, 72 of mxfp4, 80 of int4 and int8, 40 of fp8 or 64 of dense weights the grouped
product takes over, and from fewer on where there are few experts, at which tokens soon meet: with more choices than
1.25 times the experts of nvfp4, 1.5 times of mxfp4 and int4, as many of fp8, and twice of int8 and dense weights; and
where the rows do not fit into shared memory. At 24 choices of 8/2/4096/1792 nvfp4 takes 47 us by the grouped product
and 72 by the kernels for few tokens, int4 54 and 76; at 32 of 128/8/2048/768 mxfp4 takes 49 and 41 (39 since).

In the grouped product dense weights take wgmma; packed ones take mma.sync while an expert has up to 20 tokens in the
mean (four bits) or 16 (eight), and beyond that wgmma. A weight is decoded once for all tokens. nvfp4 512/10/2560/640
takes 84, 134, 209 and 305 us at 8, 16, 32 and 64 tokens with the router, 2.5 to 3.3 TB/s; wgmma, whose waits held up
the decoding, took 210, 332 and 478 from 16 on without it. At 16 and 64 tokens int4/32 takes 161 and 360 us (wgmma 261
and 609), mxfp4 32/4/2880/2880 151 and 195 (236 and 248), int8/128 134 and 194 (227 and 326), fp8/128 114 and 169 (183
and 266). By ncu, before rows of tokens came by bulk copies, two thirds of the issue slots were busy with nvfp4 and 57 %
of the pipe of logical operations, and half of the slots with int8. A weight of nvfp4 takes 2.6 instructions of a thread
with all that goes with it, and the rest is the ends of tiles, in FC2 a fifth of the instructions, and the last wave: a
multiprocessor is at work for 79 to 92 % of a kernel. The products of mxfp4 at 64 tokens waited a fifth of the time for
rows of tokens, which three warps copied by 16 bytes, and whose weights were there; since one warp has a row copied at
once, all formats but int4 take 2 to 9 % less. Blocks of 64 weight rows, four to a multiprocessor, took up to 8 % longer
than two of 128; one of 256 took 4 % longer at 16 tokens and 2 % less at 64.

With wgmma, dense weights and rows of tokens come to shared memory, 256 weight rows by up to 176 tokens of an expert.
Dense 128/8/2048/768 takes 195, 261, 293, 345 and 676 us at 16, 32, 64, 1024 and 4096 tokens, which is 3.9 TB/s at 16
and 458 TFLOP/s at 4096; 8/2/4096/14336 took 4.5 to 4.7 ms at 4096 tokens, 610 to 640 TFLOP/s, in runs without the
contrib op beside it (the sweep below, with it, has 5.3 ms). Packed weights are decoded into the place of dense ones by
one or two warpgroups of their own, while two others multiply what was decoded before: at 1024 and 4096 tokens of
128/8/2048/768 int8/128 takes 297 and 745 us, fp8/128 291 and 760, nvfp4 299 and 771, mxfp4 32/4/2880/2880 562 us and
2.0 ms. Decoded into the registers of those who multiply, over tiles of 64 tokens, int8 took 573 us at 1024 tokens, fp8
482, mxfp4 774. By ncu, dense FC1 at 4096 tokens keeps the tensor pipe busy for 65 % of the time: a tile's end takes a
sixth of it, in which nothing is multiplied, waits for copies a seventh, and the L2 is at 68 %. int8's FC1 at 1024
tokens is bound by shared memory, 78 % busy, which decoded weights pass twice. Of eight-bit weights two stages of copies
in place of three took 32 % longer at 4096 tokens; tiles of 128 tokens there 10 %; copies that bring 256 bytes into the
L2 made no difference.
"""
