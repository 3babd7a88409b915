// wgmma: each warp's 16 rows of a product. Operands in shared memory are read when the warp has issued it or when it is
// awaited, by the seed; results appear in the registers at the wait only.
#include "tests/emulated_gpu/runtime/wgmma.h"

#include <cstring>

#include "tests/emulated_gpu/runtime/number_formats.h"

namespace emulated {
namespace {

struct Descriptor {
  unsigned start, leading, stride, row_bytes;
};

Descriptor read_descriptor(unsigned long long bits) {
  const auto low = static_cast<unsigned>(bits), high = static_cast<unsigned>(bits >> 32);
  const unsigned swizzle = high >> 30;
  if (swizzle != 1 && swizzle != 2) fail("wgmma: a descriptor without a swizzle of 128 or 64 bytes");
  if ((high >> 17 & 7) != 0) fail("wgmma: a descriptor with a base offset");
  return {(low & 0x3fff) << 4, (low >> 16 & 0x3fff) << 4, (high & 0x3fff) << 4, swizzle == 1 ? 128u : 64u};
}

// Sixteen bytes of shared memory by their address before the swizzle.
const char* unit_at(const char* shared, unsigned size, unsigned address, unsigned row_bytes) {
  const unsigned mask = row_bytes / 16 - 1;
  const unsigned swizzled = address ^ (address >> 7 & mask) << 4;
  if (swizzled < kSharedStart || swizzled + 16 > size) {
    note_fault("wgmma reads shared address " + std::to_string(swizzled) + " of " + std::to_string(size));
    return shared + kSharedStart;
  }
  return shared + swizzled;
}

int element_bytes(int type) {
  return type == kEmulatedTf32 ? 4 : type == kEmulatedE4M3 || type == kEmulatedE5M2 ? 1 : 2;
}

// element(i, k) for `count` rows (of A) or columns (of B) and `depth` along the sum.
template <class Store>
void read_operand(const char* shared, unsigned size, unsigned long long bits, int type, bool transposed, int first,
                  int count, int depth, Store store) {
  const Descriptor tile = read_descriptor(bits);
  const int bytes = element_bytes(type), per_unit = 16 / bytes;
  float values[16];
  if (!transposed) {
    for (int i = first; i < first + count; ++i) {
      for (int k = 0; k < depth; k += per_unit) {
        const unsigned row = static_cast<unsigned>(i);
        const unsigned address =
            tile.start + row / 8 * tile.stride + row % 8 * tile.row_bytes + static_cast<unsigned>(k * bytes);
        widen(type, unit_at(shared, size, address, tile.row_bytes), per_unit, values);
        for (int j = 0; j < per_unit; ++j) store(i - first, k + j, values[j]);
      }
    }
    return;
  }
  const unsigned row_elements = tile.row_bytes / 2;
  for (int k = 0; k < depth; ++k) {
    for (int i = first; i < first + count; i += per_unit) {
      const auto column = static_cast<unsigned>(i), row = static_cast<unsigned>(k);
      const unsigned address = tile.start + column / row_elements * tile.leading + row / 8 * tile.stride +
                               row % 8 * tile.row_bytes + column % row_elements * 2;
      widen(type, unit_at(shared, size, address, tile.row_bytes), per_unit, values);
      for (int j = 0; j < per_unit; ++j) store(i - first + j, k, values[j]);
    }
  }
}

// A of 2:4: the kept pairs of each four go where the metadata says.
void spread_sparse(PendingWgmma& product) {
  float kept[16][16];
  std::memset(kept, 0, sizeof(kept));
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) kept[i][k] = product.a[i][k];
    std::memset(product.a[i], 0, sizeof(product.a[i]));
  }
  for (int i = 0; i < 16; ++i) {
    for (int group = 0; group < 8; ++group) {
      const int lane = i % 8 * 4 + 2 * product.shape.sparse_selector + group / 4;
      const unsigned metadata = product.metadata[lane] >> (i / 8 * 16 + group % 4 * 4) & 15;
      const unsigned first = metadata & 3, second = metadata >> 2;
      // Rows past the matrix hold zeros and whatever metadata.
      const bool matters = kept[i][group * 2] != 0 || kept[i][group * 2 + 1] != 0;
      if (matters && first >= second) note_fault("wgmma.sp: metadata names a pair out of order");
      product.a[i][group * 4 + first] = kept[i][group * 2];
      product.a[i][group * 4 + second] = kept[i][group * 2 + 1];
    }
  }
}

void read_operands(Warp& warp, PendingWgmma& product) {
  product.is_read = true;
  const EmulatedWgmma& shape = product.shape;
  const char* shared = warp.block->shared;
  const unsigned size = shared_size();
  const int depth = product.depth();
  const bool is_sparse = shape.sparse_selector >= 0;
  if (shape.a_registers == nullptr) {
    read_operand(shared, size, shape.a, shape.type_a, shape.transpose_a != 0, static_cast<int>(warp.index % 4 * 16), 16,
                 is_sparse ? 16 : depth, [&](int i, int k, float value) { product.a[i][k] = value; });
    if (is_sparse) spread_sparse(product);
  }
  read_operand(shared, size, shape.b, shape.type_b, shape.transpose_b != 0, 0, shape.columns, depth,
               [&](int j, int k, float value) { product.b[k][j] = value; });
}

// Fragments of A: register r of a lane is row lane / 4 + 8 (r % 2), 4 bytes at lane % 4 of 16-byte group r / 2.
void read_registers(PendingWgmma& product, unsigned lane, const unsigned* registers) {
  const int per_word = 4 / element_bytes(product.shape.type_a);
  for (int r = 0; r < 4; ++r) {
    float values[4];
    widen(product.shape.type_a, &registers[r], per_word, values);
    for (int j = 0; j < per_word; ++j) {
      product.a[lane / 4 + r % 2 * 8][(lane % 4 + r / 2 * 4) * per_word + j] = values[j];
    }
  }
}

void multiply(Warp& warp, PendingWgmma& product) {
  if (!product.is_read) read_operands(warp, product);
  const int columns = product.shape.columns, depth = product.depth();
  for (int i = 0; i < 16; ++i) {
    float sum[256];
    for (int j = 0; j < columns; ++j) {
      const unsigned lane = i % 8 * 4 + j % 8 / 2;
      sum[j] = product.shape.accumulate != 0 ? product.d[lane][j / 8 * 4 + i / 8 * 2 + j % 2] : 0.0f;
    }
    for (int k = 0; k < depth; ++k) {
      const float factor = product.a[i][k];
      for (int j = 0; j < columns; ++j) sum[j] += factor * product.b[k][j];
    }
    for (int j = 0; j < columns; ++j) product.d[i % 8 * 4 + j % 8 / 2][j / 8 * 4 + i / 8 * 2 + j % 2] = sum[j];
  }
}

bool act_wait(Warp& warp, unsigned) {
  const int pending = *static_cast<const int*>(warp.lanes[0]->operand);
  while (static_cast<int>(warp.product_groups.size()) > pending) {
    for (size_t left = warp.product_groups.front(); left > 0; --left) {
      PendingWgmma& product = *warp.products.front();
      if (product.arrived != kFullMask) note_fault("wgmma.wait_group before all lanes have issued the product");
      multiply(warp, product);
      warp.spare_products.push_back(std::move(warp.products.front()));
      warp.products.pop_front();
      ++warp.retired_products;
    }
    warp.product_groups.pop_front();
  }
  return true;
}

}  // namespace

Warp::Warp() = default;
Warp::~Warp() = default;

}  // namespace emulated

using namespace emulated;

extern "C" {

void emulated_wgmma_fence(void) {}

void emulated_wgmma(const EmulatedWgmma* operation) {
  Fiber& fiber = *current;
  Warp& warp = *fiber.warp;
  const unsigned lane = fiber.thread % 32;
  const size_t place = fiber.issued_products++ - warp.retired_products;
  if (place == warp.products.size()) {
    std::unique_ptr<PendingWgmma> product;
    if (warp.spare_products.empty()) {
      product = std::make_unique<PendingWgmma>();
    } else {
      product = std::move(warp.spare_products.back());
      warp.spare_products.pop_back();
    }
    product->shape = *operation;
    product->arrived = 0;
    product->is_read = false;
    warp.products.push_back(std::move(product));
  }
  PendingWgmma& product = *warp.products[place];
  const EmulatedWgmma& shape = product.shape;
  if (shape.a != operation->a || shape.b != operation->b || shape.columns != operation->columns ||
      shape.accumulate != operation->accumulate || shape.type_a != operation->type_a) {
    fail("wgmma: the lanes of a warp name different operands");
  }
  product.d[lane] = operation->d;
  product.metadata[lane] = operation->metadata;
  if (operation->a_registers != nullptr) read_registers(product, lane, operation->a_registers);
  product.arrived |= 1u << lane;
  if (lane == 0) ++warp.open_products;
  if (product.arrived == kFullMask && chance(2)) read_operands(warp, product);
}

void emulated_wgmma_commit(void) {
  Warp& warp = *current->warp;
  if (current->thread % 32 != 0) return;  // the lanes agree
  warp.product_groups.push_back(warp.open_products);
  warp.open_products = 0;
}

void emulated_wgmma_wait(int pending) {
  meet(kFullMask, "wgmma.wait_group", &pending, act_wait);
}
}
