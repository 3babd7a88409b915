// ldmatrix, stmatrix, movmatrix and mma.sync: the 32 lanes meet, the last one moves or multiplies for all. Products are
// summed in float, one after the other; the hardware's own order and rounding of sums are not known.
#include <cmath>
#include <cstring>

#include "tests/emulated_gpu/runtime/machine.h"
#include "tests/emulated_gpu/runtime/number_formats.h"

namespace emulated {
namespace {

struct Move {
  unsigned* values;  // 4 a lane, or 1
  char* row;         // what the lane's address names
  bool transposed;
};

template <class Operand>
Operand& operand_of(Warp& warp, unsigned lane) {
  return *static_cast<Operand*>(const_cast<void*>(warp.lanes[lane]->operand));
}

// The two elements of matrix m that register m of a lane holds: row and column of each.
struct Element {
  unsigned row, column;
};
Element element_of(unsigned lane, unsigned half, bool transposed) {
  const unsigned along = lane % 4 * 2 + half, across = lane / 4;
  return transposed ? Element{along, across} : Element{across, along};
}

bool act_load(Warp& warp, unsigned) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Move& own = operand_of<Move>(warp, lane);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      unsigned word = 0;
      for (unsigned half = 0; half < 2; ++half) {
        const Element at = element_of(lane, half, own.transposed);
        uint16_t element;
        std::memcpy(&element, operand_of<Move>(warp, matrix * 8 + at.row).row + at.column * 2, 2);
        word |= static_cast<unsigned>(element) << (16 * half);
      }
      own.values[matrix] = word;
    }
  }
  return true;
}

bool act_store(Warp& warp, unsigned) {
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Move& own = operand_of<Move>(warp, lane);
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      for (unsigned half = 0; half < 2; ++half) {
        const Element at = element_of(lane, half, own.transposed);
        const auto element = static_cast<uint16_t>(own.values[matrix] >> (16 * half));
        std::memcpy(operand_of<Move>(warp, matrix * 8 + at.row).row + at.column * 2, &element, 2);
      }
    }
  }
  return true;
}

bool act_transpose(Warp& warp, unsigned) {
  uint16_t matrix[8][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    for (unsigned half = 0; half < 2; ++half) {
      matrix[lane / 4][lane % 4 * 2 + half] =
          static_cast<uint16_t>(*operand_of<Move>(warp, lane).values >> (16 * half));
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned across = lane / 4, along = lane % 4 * 2;
    *operand_of<Move>(warp, lane).values = matrix[along][across] | static_cast<unsigned>(matrix[along + 1][across])
                                                                       << 16;
  }
  return true;
}

// m16n8k32 of signed bytes.
struct IntegerMma {
  int* sum;
  const unsigned* a;
  unsigned b[2];
};

int byte_of(unsigned word, unsigned index) {
  return static_cast<signed char>(word >> (8 * index) & 0xff);
}

bool act_integer_mma(Warp& warp, unsigned) {
  int a[16][32], b[32][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const IntegerMma& own = operand_of<IntegerMma>(warp, lane);
    const unsigned line = lane / 4, first = lane % 4 * 4;
    for (unsigned byte = 0; byte < 4; ++byte) {
      for (unsigned i = 0; i < 4; ++i) a[line + i % 2 * 8][first + i / 2 * 16 + byte] = byte_of(own.a[i], byte);
      for (unsigned i = 0; i < 2; ++i) b[first + i * 16 + byte][line] = byte_of(own.b[i], byte);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const IntegerMma& own = operand_of<IntegerMma>(warp, lane);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 32; ++k) own.sum[i] += a[row][k] * b[k][column];
    }
  }
  return true;
}

// m16n8k32 of FP8: bytes lie as those of integers.
struct Float8Mma {
  float* sum;
  const unsigned* a;
  unsigned b[2];
  EmulatedType type_a, type_b;
};

bool act_float8_mma(Warp& warp, unsigned) {
  float a[16][32], b[8][32];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Float8Mma& own = operand_of<Float8Mma>(warp, lane);
    const unsigned line = lane / 4, first = lane % 4 * 4;
    for (unsigned i = 0; i < 4; ++i) widen(own.type_a, &own.a[i], 4, &a[line + i % 2 * 8][first + i / 2 * 16]);
    for (unsigned i = 0; i < 2; ++i) widen(own.type_b, &own.b[i], 4, &b[line][first + i * 16]);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Float8Mma& own = operand_of<Float8Mma>(warp, lane);
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 32; ++k) own.sum[i] += a[row][k] * b[column][k];
    }
  }
  return true;
}

// m8n8k4 and m16n8k4 of doubles; products are added without being rounded first.
struct DoubleMma {
  double* sum;
  const double* a;
  double b;
  int rows;
};

bool act_double_mma(Warp& warp, unsigned) {
  double a[16][4], b[4][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const DoubleMma& own = operand_of<DoubleMma>(warp, lane);
    for (int row = 0; row < own.rows; row += 8) a[lane / 4 + row][lane % 4] = own.a[row / 8];
    b[lane % 4][lane / 4] = own.b;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const DoubleMma& own = operand_of<DoubleMma>(warp, lane);
    for (int i = 0; i < own.rows / 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 4; ++k) own.sum[i] = std::fma(a[row][k], b[k][column], own.sum[i]);
    }
  }
  return true;
}

struct Mma {
  float* sum;
  const unsigned* a;
  unsigned b[2];
  EmulatedType type;
};

bool act_mma(Warp& warp, unsigned) {
  const EmulatedType type = operand_of<Mma>(warp, 0).type;
  const int depth = type == kEmulatedTf32 ? 8 : 16;
  float a[16][16], b[16][8], sum[16][8];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Mma& own = operand_of<Mma>(warp, lane);
    const unsigned row = lane / 4, column = lane % 4;
    for (unsigned i = 0; i < 4; ++i) {
      float values[2];
      if (type == kEmulatedTf32) {
        widen(type, &own.a[i], 1, values);
        a[row + i % 2 * 8][column + i / 2 * 4] = values[0];
      } else {
        widen(type, &own.a[i], 2, values);
        a[row + i % 2 * 8][column * 2 + i / 2 * 8] = values[0];
        a[row + i % 2 * 8][column * 2 + i / 2 * 8 + 1] = values[1];
      }
      sum[row + i / 2 * 8][column * 2 + i % 2] = own.sum[i];
    }
    for (unsigned i = 0; i < 2; ++i) {
      float values[2];
      if (type == kEmulatedTf32) {
        widen(type, &own.b[i], 1, values);
        b[column + i * 4][row] = values[0];
      } else {
        widen(type, &own.b[i], 2, values);
        b[column * 2 + i * 8][row] = values[0];
        b[column * 2 + i * 8 + 1][row] = values[1];
      }
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < depth; ++k) {
      for (int j = 0; j < 8; ++j) sum[i][j] += a[i][k] * b[k][j];
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const Mma& own = operand_of<Mma>(warp, lane);
    for (unsigned i = 0; i < 4; ++i) own.sum[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
  return true;
}

}  // namespace
}  // namespace emulated

using namespace emulated;

extern "C" {

void emulated_ldmatrix(unsigned* values, unsigned address, int transposed) {
  Move move{values, shared_pointer(address, 16, 16), transposed != 0};
  meet(kFullMask, "ldmatrix", &move, act_load);
}

void emulated_stmatrix(unsigned address, const unsigned* values, int transposed) {
  Move move{const_cast<unsigned*>(values), shared_pointer(address, 16, 16), transposed != 0};
  meet(kFullMask, "stmatrix", &move, act_store);
}

unsigned emulated_movmatrix(unsigned value) {
  Move move{&value, nullptr, true};
  meet(kFullMask, "movmatrix", &move, act_transpose);
  return value;
}

void emulated_integer_mma(int* sum, const unsigned* a, unsigned b0, unsigned b1) {
  IntegerMma mma{sum, a, {b0, b1}};
  meet(kFullMask, "mma.sync", &mma, act_integer_mma);
}

void emulated_float8_mma(EmulatedType type_a, EmulatedType type_b, float* sum, const unsigned* a, unsigned b0,
                         unsigned b1) {
  Float8Mma mma{sum, a, {b0, b1}, type_a, type_b};
  meet(kFullMask, "mma.sync", &mma, act_float8_mma);
}

void emulated_double_mma(double* sum, const double* a, double b, int rows) {
  DoubleMma mma{sum, a, b, rows};
  meet(kFullMask, "mma.sync", &mma, act_double_mma);
}

void emulated_mma(EmulatedType type, float* sum, const unsigned* a, unsigned b0, unsigned b1) {
  Mma mma{sum, a, {b0, b1}, type};
  meet(kFullMask, "mma.sync", &mma, act_mma);
}
}
