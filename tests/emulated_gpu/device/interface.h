// What emulated kernels and the emulated driver know of each other: plain C, no standard header, since device code has
// none. Kernels are shared objects that the emulated libcuda.so.1 loads; what is declared here is defined there.
#pragma once

extern "C" {

struct EmulatedIndex {
  unsigned x, y, z;
};

// Of the fiber (CUDA thread) that runs; the scheduler writes them before it resumes one.
extern EmulatedIndex emulated_thread, emulated_block, emulated_block_size, emulated_grid;
extern EmulatedIndex emulated_cluster_rank, emulated_cluster_size;
extern char* emulated_shared_memory;  // of its block

// A shared object's table, found by dlsym: what has to be known of its kernel before a launch.
struct EmulatedKernel {
  void (*run)(void** arguments);
  unsigned argument_count;
  const unsigned* argument_bytes;
  unsigned static_shared_bytes;
  unsigned dynamic_shared_alignment;
};

// --- scheduling
void emulated_spin(void);   // in a loop that waits for other threads: they run first
void emulated_point(void);  // others may run here: around atomics and fences
long long emulated_clock(void);
[[noreturn]] void emulated_fail(const char* message);

// --- shared memory: 32-bit addresses, of the own block or (mapa) of a block of the cluster
unsigned emulated_shared_address(const void* pointer);
void* emulated_shared_pointer(unsigned address, unsigned bytes);  // checked; bytes is the alignment too
unsigned emulated_map_shared(unsigned address, unsigned rank);

// --- a warp
unsigned long long emulated_shuffle(unsigned mask, unsigned long long value, int argument, int width, int mode);
unsigned emulated_ballot(unsigned mask, int predicate);
unsigned emulated_match_any(unsigned mask, unsigned long long value);
unsigned emulated_reduce(unsigned mask, unsigned value, int operation);
void emulated_sync_warp(unsigned mask);
unsigned emulated_active_mask(void);

// --- a block, a cluster
int emulated_sync_threads(int predicate, int mode);  // mode 0: none, 1: or, 2: and, 3: count
void emulated_named_barrier(int barrier, int threads, int waits);
void emulated_cluster_arrive(void);
void emulated_cluster_wait(void);

// --- mbarrier
void emulated_mbarrier_init(unsigned barrier, unsigned count);
void emulated_mbarrier_arrive(unsigned barrier, unsigned expected_bytes);
int emulated_mbarrier_try_wait(unsigned barrier, unsigned parity);

// --- copies
void emulated_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned source_bytes);
void emulated_cp_async_commit(void);
void emulated_cp_async_wait(int pending);
void emulated_cp_async_mbarrier_arrive(unsigned barrier);
void emulated_bulk_load(unsigned destination, const void* source, unsigned bytes, unsigned barrier);
void emulated_bulk_store(void* destination, unsigned source, unsigned bytes);
void emulated_bulk_commit(void);
void emulated_bulk_wait(int pending);
void emulated_tensor_load(unsigned destination, const void* map, int rank, const int* coordinates, unsigned barrier,
                          unsigned blocks);  // blocks 0: the own one
void emulated_tensor_store(const void* map, int rank, const int* coordinates, unsigned source);
void emulated_store_async(unsigned address, const void* value, unsigned bytes, unsigned barrier);

// --- matrices
void emulated_ldmatrix(unsigned* values, unsigned address, int transposed);
void emulated_stmatrix(unsigned address, const unsigned* values, int transposed);
unsigned emulated_movmatrix(unsigned value);
enum EmulatedType { kEmulatedBf16, kEmulatedF16, kEmulatedE4M3, kEmulatedE5M2, kEmulatedTf32 };
void emulated_mma(EmulatedType type, float* sum, const unsigned* a, unsigned b0, unsigned b1);
void emulated_float8_mma(EmulatedType type_a, EmulatedType type_b, float* sum, const unsigned* a, unsigned b0,
                         unsigned b1);
void emulated_integer_mma(int* sum, const unsigned* a, unsigned b0, unsigned b1);
void emulated_double_mma(double* sum, const double* a, double b, int rows);  // 8 or 16

// One wgmma: operands by descriptors (a_registers null) or A in four registers.
struct EmulatedWgmma {
  float* d;
  const unsigned* a_registers;
  unsigned long long a, b;
  int columns;
  int type_a, type_b;
  int transpose_a, transpose_b;
  int accumulate;
  int sparse_selector;  // -1: dense
  unsigned metadata;
};
void emulated_wgmma_fence(void);
void emulated_wgmma(const EmulatedWgmma* product);
void emulated_wgmma_commit(void);
void emulated_wgmma_wait(int pending);
}
