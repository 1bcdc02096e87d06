// Included before every source of the portable path: kernels for NVIDIA cards from compute capability 8.0 on, which run beside those for
// Hopper in one binary. Some sources are compiled for both paths, so what they define has other names here.
#pragma once

#define EXPERTD_PORTABLE

#define expertd expertd_portable
#define expertd_gate expertd_portable_gate
#define expertd_dispatch expertd_portable_dispatch
#define expertd_combine expertd_portable_combine
#define expertd_meet expertd_portable_meet
#define expertd_scale expertd_portable_scale
#define expertd_shared expertd_portable_shared
#define expertd_tier expertd_portable_tier
#define expertd_copy_in expertd_portable_copy_in
#define expertd_copy_out expertd_portable_copy_out
#define expertd_load_modules expertd_portable_load_modules
#define expertd_experts_setup expertd_portable_experts_setup
#define expertd_experts_launch expertd_portable_experts_launch
#define expertd_experts_pack expertd_portable_experts_pack
#define expertd_experts_pack_host expertd_portable_experts_pack_host
#define expertd_experts_pack_narrow expertd_portable_experts_pack_narrow
#define expertd_experts_pack_narrow_host expertd_portable_experts_pack_narrow_host
#define expertd_experts_matrix_bytes expertd_portable_experts_matrix_bytes
#define expertd_experts_repack expertd_portable_experts_repack
