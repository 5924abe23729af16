"""What bounds the decode chain's kernels: a section of the performance page, in Markdown."""

from __future__ import annotations

DECODE_CHAIN_BOUNDS = """\
### What bounds a layer

nvfp4 512/10/2560/640 on the same GPU, by marks of the global timer in the kernels, and by ncu on a build close to this
one:

- At 4 tokens the products run at the speed of memory: FC1's 73.7 MB in 17 us (4.3 TB/s), FC2's 36.9 MB in 9.4 us
  (3.9 TB/s). The other half of the time goes before and after them: each block reads the routing and finds its items
  (3.5 us), fills its rings (2 us), converts the activations (1.5 us), in FC1 and again in FC2, and finishes its columns
  (2 us). That code is executed rather than waited for: in a kernel that ran both layers twice, on other experts, the
  second time took as long, and 2 % of the stalls were for instructions.
- At 1 token 6.4 us of 22.5 would do for the bytes. FC1 is at work for 11 us, of which 5 are products; FC2 waits for its
  last block, 2 us behind the median, then takes 1.1 us to stage, 2.4 for the products and 0.9 to finish. FC1's issue
  slots are 32 % busy, its pipe of logical operations 38 %, DRAM 26 %; 22 % of the stalls are barriers.

Other designs, in us at 1 and 4 tokens, measured in the same way: many small blocks that scale each weight before the
product 23.7 and 80.8; the same, scaling blocks of 16 after the product 28.6 and 100; one block a multiprocessor whose
warps meet at a barrier for each unit 24.1 and 68; FC2 resident beside FC1, its weights prefetched into the L2, with the
registers that leaves, 22.9 and 89; half as many warps again, with fewer registers, 29 and 107. One kernel for both
layers, behind one that finds the items, whose blocks meet by flags between the layers: 23.1 and 62.6 with FC2's weights
streaming on behind FC1's, 23.9 and 65 where they are asked for once a block has finished its part of FC1; beside 22.4
and 57.7 with two kernels. What the second launch costs goes into the kernel ahead, 1.5 us until the other one goes on,
and into the flags, 1 to 2 us behind the last block; and the products took no less time. Weights that leave the L2
first: no difference, dense 3 % slower. Two groups of weights in flight in FC1 in place of three, which is how it is
now: 21.9 and 55.9.

By marks of the global timer again, behind a kernel that writes the routing in 1.3 us, where a layer of these kernels
takes 20.6, 31.8 and 55.2 us at 1, 2 and 4 tokens: two kernels in the same grids that bring the same bytes by bulk
copies and multiply nothing take 10.9 us at 1 token. All of a block's weights of FC1 on their way at once by bulk
copies: 22.3, for the first unit then arrives as late as the last; two units of 23 KB at a time 20.0, and 18.0 with
FC2's weights by bulk copies too; both kernels on a multiprocessor at once, by 12 warps of 80 registers each, 24.7, for
they spill. FC1 brings FC2's weights into the L2, or touches its parameters ahead: no difference. A step of 2048 weights
is 160 to 190 instructions of a warp in FC1, 88 of which decode, and the multiplying warps issue in 75 to 90 % of the
cycles. At 4 tokens the last block of FC1 ends 9 us behind the median, for the units of an expert that several tokens
share lie in a few blocks.

The other packed formats take the same kernels. Their weights go to the tensor core as exact codes in float16, and the
sums of a block are scaled: at 1 and 4 tokens of mxfp4 32/4/2880/2880 that takes 32 and 87 us, where the grouped product
on wgmma takes 71 and 143; 23 and 59 of int4/32 512/10/2560/640 (53 and 100); 21 and 52 of int8/128 128/8/2048/768 (64
and 113); 21 and 53 of fp8/128 128/8/2048/768 (49 and 91). From 1 token on the time grows with the bytes at 2.2 TB/s for
mxfp4, where tokens share experts, at 2.3 for int4 and 3.1 for int8 and fp8; what they have to issue would allow 5. FC2
has two experts to a warp's 16 rows of weights there, and four with int4, which shares out 2560 columns better; with
four mxfp4 takes 101 us at 4 tokens and int8 60. A second chain of products in flight in each warp made no difference.

Behind 40 choices of nvfp4 or fp8, 64 of int4 or int8, 16 of mxfp4, 64 of dense weights and two for each expert, or what
fits into shared memory, the grouped product takes over: dense weights with wgmma, packed ones with mma.sync up to 20
tokens of an expert in the mean of four bits and 16 of eight, then with wgmma. A weight is decoded once for all tokens.
Without the router, nvfp4 512/10/2560/640 takes 82, 130, 205 and 304 us at 8, 16, 32 and 64 tokens, 2.5 to 3.3 TB/s;
wgmma, whose waits held up the decoding, took 210, 332 and 478 from 16 on.
At 16 and 64 tokens int4/32 takes 159 and 358 us (wgmma 261 and 609), mxfp4 150 and 195 (236 and 248), int8/128 132 and
190 (227 and 326), fp8/128 110 and 165 (183 and 266). By ncu, before rows of tokens came by bulk copies, two thirds of
the issue slots were busy with nvfp4 and 57 % of the pipe of logical operations, and half of the slots with int8. A
weight of nvfp4 takes 2.6 of them, and the rest is the ends of tiles, in FC2 a fifth of the instructions, and the last
wave: a multiprocessor is at work for 79 to 92 % of a kernel. The products of mxfp4 at 64 tokens waited for a stage a
fifth of the time, whose weights were there, while three warps copied rows of tokens by 16 bytes; since one warp has a
row copied at once, all formats but int4 take 2 to 9 % less. Blocks of 64 weight rows, four to a multiprocessor, took up
to 8 % longer than two of 128; one of 256 took 4 % longer at 16 tokens and 2 % less at 64.

With wgmma, dense weights and rows of tokens come to shared memory, 256 weight rows by up to 176 tokens of an expert.
Dense 128/8/2048/768 takes 190, 256, 285, 339 and 631 us at 16, 32, 64, 1024 and 4096 tokens, which is 4.0 TB/s at 16
and 490 TFLOP/s at 4096; 8/2/4096/14336 takes 645 us at 16 tokens and 4.5 to 4.7 ms at 4096, 610 to 640 TFLOP/s, without
the router, in other runs than the sweep below, which has 5.25 ms with it. Packed weights are decoded into the place of
dense ones by one or two warpgroups of their own, while two others multiply what was decoded before: at 1024 and 4096
tokens of 128/8/2048/768 int8/128 takes 296 to 309 and 720 us, fp8/128 300 and 741, nvfp4 306 and 777, mxfp4
32/4/2880/2880 568 us and 2.0 ms. Decoded into the registers of those who multiply, over tiles of 64 tokens, int8 took
573 us at 1024 tokens, fp8 482, mxfp4 774. By ncu, dense FC1 at 4096 tokens keeps the tensor pipe busy for 65 % of the
time: a tile's end takes a sixth of it, in which nothing is multiplied, waits for copies a seventh, and the L2 is at 68
%. int8's FC1 at 1024 tokens is bound by shared memory, 78 % busy, which decoded weights pass twice. Of eight-bit
weights two stages of copies in place of three take 956 us at 4096 tokens in place of 726; tiles of 128 tokens there 858
in place of 778; copies that bring 256 bytes into the L2 made no difference.
"""
