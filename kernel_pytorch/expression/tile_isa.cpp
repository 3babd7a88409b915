// Runs tile plans (tile.h), once per CPU level: blocks of columns outside, rows inside, so that what depends on the
// keys alone is computed once for all rows.
#include <cstring>
#include <limits>

#include "kernel_pytorch/expression/tile.h"
#include "kernel_pytorch/expression/tile_loops.h"

namespace kernel_pytorch::expression::KP_ISA_NAMESPACE {
namespace {

KP_PRIMITIVE int64_t round_up(int64_t value, int64_t to) {
  return (value + to - 1) / to * to;
}

// A thread's memory: scalars, then the register files.
template <class Real>
struct Machine {
  const TilePlan& plan;
  const Tile& tile;
  Value<Real>* scalars;
  int64_t* offsets;
  int64_t* integers;
  Real* reals;
  int32_t* narrows;
  uint8_t* booleans;

  Machine(const TilePlan& plan, const Tile& tile, void* workspace) : plan(plan), tile(tile) {
    auto* at = static_cast<unsigned char*>(workspace);
    scalars = reinterpret_cast<Value<Real>*>(at);
    at += round_up(static_cast<int64_t>(plan.scalar_count() * sizeof(Value<Real>)), 64);
    offsets = reinterpret_cast<int64_t*>(at);
    integers = offsets + kTileBlock;
    reals = reinterpret_cast<Real*>(integers + plan.register_count(Type::kInt) * kTileBlock);
    narrows = reinterpret_cast<int32_t*>(reals + plan.register_count(Type::kFloat) * kTileBlock);
    booleans = reinterpret_cast<uint8_t*>(narrows + plan.narrow_register_count() * kTileBlock);
  }
  Real* real(int place) const { return reals + place * kTileBlock; }
  int64_t* integer(int place) const { return integers + place * kTileBlock; }
  int32_t* narrow(int place) const { return narrows + place * kTileBlock; }
  uint8_t* boolean(int place) const { return booleans + place * kTileBlock; }

  // The tile's own memory is read by whole blocks, whatever the number of columns.
  void run_scalars(TilePlan::Stage stage, int64_t query) const {
    for (const Instruction& instruction : plan.stage(stage)) {
      const Value<Real> value = scalar_value(instruction, query);
      scalars[instruction.target.place] = value;
      if (instruction.target.wide >= 0) spread(value, instruction);
    }
  }

  void run_blocks(TilePlan::Stage stage, int64_t key, int columns) const {
    for (const Instruction& instruction : plan.stage(stage)) run_block(instruction, key, columns);
  }

 private:
  void spread(const Value<Real>& value, const Instruction& instruction) const {
    const int place = instruction.target.wide;
    if (instruction.type == Type::kFloat) return fill(real(place), value.real);
    if (instruction.type == Type::kBool) return fill(boolean(place), static_cast<uint8_t>(value.boolean));
    if (instruction.is_narrow) return fill(narrow(place), static_cast<int32_t>(value.integer));
    fill(integer(place), value.integer);
  }
  template <class T>
  static void fill(T* to, T value) {
    for (int i = 0; i < kTileBlock; ++i) to[i] = value;
  }

  Value<Real> scalar_value(const Instruction& instruction, int64_t query) const {
    Value<Real> value;
    switch (instruction.op) {
      case Op::kBatch:
        value.integer = tile.batch;
        return value;
      case Op::kHead:
        value.integer = tile.head;
        return value;
      case Op::kQuery:
        value.integer = query;
        return value;
      case Op::kConstant:
        value.boolean = instruction.constant.boolean;
        value.integer = instruction.constant.integer;
        value.real = static_cast<Real>(instruction.constant.real);
        return value;
      case Op::kLoad:
        return scalar_load(instruction);
      default:
        return apply(instruction.op, instruction.operands, source(instruction, 0), source(instruction, 1),
                     source(instruction, 2));
    }
  }
  Value<Real> source(const Instruction& instruction, int i) const {
    return i < instruction.source_count ? scalars[instruction.sources[i].place] : Value<Real>{};
  }

  int64_t scalar_offset(const Instruction& load) const {
    const TensorView& from = plan.captured()[load.capture];
    int64_t offset = 0;
    for (int i = 0; i < load.source_count; ++i) {
      if ((load.scalar_sources >> i & 1) == 0) continue;
      offset += place_of(scalars[load.sources[i].place].integer, from.sizes[i]) * from.strides[i];
    }
    return offset;
  }

  Value<Real> scalar_load(const Instruction& load) const {
    for (int i = 0; i < kStep; ++i) offsets[i] = 0;
    offsets[0] = scalar_offset(load);
    alignas(64) Real real_value[kStep];
    alignas(64) int64_t integer_value[kStep];
    alignas(64) uint8_t boolean_value[kStep];
    fetch(plan.captured()[load.capture], real_value, integer_value, nullptr, boolean_value, cpu::kLanes);
    Value<Real> value;
    if (load.type == Type::kFloat) value.real = real_value[0];
    if (load.type == Type::kInt) value.integer = integer_value[0];
    if (load.type == Type::kBool) value.boolean = boolean_value[0] != 0;
    return value;
  }

  // To the target of the capture's type, the elements at `offsets`; integers of 32 bits to the narrow one if given.
  void fetch(const TensorView& from, Real* real_target, int64_t* integer_target, int32_t* narrow_target,
             uint8_t* boolean_target, int columns) const {
    switch (from.dtype) {
      case DType::kFloat32:
        return gather<Real, float>(real_target, from.data, offsets, columns);
      case DType::kFloat64:
        return gather<Real, double>(real_target, from.data, offsets, columns);
      case DType::kBFloat16:
        return gather_narrow<BFloat16>(real_target, from.data, offsets, columns);
      case DType::kFloat16:
        return gather_narrow<Float16>(real_target, from.data, offsets, columns);
      case DType::kInt32:
        if (narrow_target != nullptr) return gather<int32_t, int32_t>(narrow_target, from.data, offsets, columns);
        return gather<int64_t, int32_t>(integer_target, from.data, offsets, columns);
      case DType::kInt64:
        return gather<int64_t, int64_t>(integer_target, from.data, offsets, columns);
      default:
        return gather<uint8_t, uint8_t>(boolean_target, from.data, offsets, columns);
    }
  }

  void run_load(const Instruction& load, int columns) const {
    const TensorView& from = plan.captured()[load.capture];
    const int64_t base = scalar_offset(load);
    for (int i = 0; i < columns; ++i) offsets[i] = base;
    for (int i = 0; i < load.source_count; ++i) {
      if ((load.scalar_sources >> i & 1) != 0) continue;
      const int place = load.sources[i].place;
      if ((load.narrow_sources >> i & 1) == 0) {
        add_offsets<int64_t>(integer(place), from.sizes[i], from.strides[i], columns);
      } else if (from.sizes[i] <= std::numeric_limits<int32_t>::max()) {
        add_offsets<int32_t>(narrow(place), from.sizes[i], from.strides[i], columns);
      } else {
        add_offsets<int64_t>(narrow(place), from.sizes[i], from.strides[i], columns);
      }
    }
    const int to = load.target.place;
    fetch(from, real(to), integer(to), load.is_narrow ? narrow(to) : nullptr, boolean(to), columns);
  }
  template <class Place, class Integer>
  void add_offsets(const Integer* __restrict indices, int64_t size, int64_t stride, int columns) const {
    int64_t* __restrict sums = offsets;
    const Place places = static_cast<Place>(size);
    if (stride == 1) {
      for (int i = 0; i < columns; ++i) sums[i] += place_of<Place>(indices[i], places);
    } else {
      for (int i = 0; i < columns; ++i) sums[i] += int64_t{place_of<Place>(indices[i], places)} * stride;
    }
  }

  void run_block(const Instruction& instruction, int64_t key, int columns) const {
    const int to = instruction.target.place;
    const int a = instruction.sources[0].wide, b = instruction.sources[1].wide, c = instruction.sources[2].wide;
    if (instruction.op == Op::kLoad) return run_load(instruction, columns);
    if (instruction.operands == Type::kFloat) return run_reals(instruction, columns);
    if (instruction.operands == Type::kBool) return run_booleans(instruction, columns);
    if (instruction.is_narrow)
      return run_integers(instruction, narrow(to), narrow(a), narrow(b), narrow(c), key, columns);
    run_integers(instruction, integer(to), integer(a), integer(b), integer(c), key, columns);
  }

  void run_reals(const Instruction& instruction, int columns) const {
    const int to = instruction.target.place;
    const int a = instruction.sources[0].wide, b = instruction.sources[1].wide, c = instruction.sources[2].wide;
    switch (instruction.op) {
      case Op::kToInt:
        return map(integer(to), real(a), columns, [](Real x) { return to_int(x); });
      case Op::kToBool:
        return map(boolean(to), real(a), columns, [](Real x) -> uint8_t { return x != 0; });
      case Op::kSelect:
        return choose(real(to), boolean(a), real(b), real(c), columns);
      case Op::kEqual:
      case Op::kNotEqual:
      case Op::kLess:
      case Op::kLessEqual:
        return run_comparison(instruction.op, boolean(to), real(a), real(b), columns);
      default:
        return run_real(instruction.op, real(to), real(a), real(b), columns);
    }
  }

  void run_booleans(const Instruction& instruction, int columns) const {
    const int to = instruction.target.place;
    const int a = instruction.sources[0].wide, b = instruction.sources[1].wide, c = instruction.sources[2].wide;
    switch (instruction.op) {
      case Op::kToFloat:
        return map(real(to), boolean(a), columns, [](uint8_t x) { return static_cast<Real>(x); });
      case Op::kToInt:
        if (instruction.is_narrow) return map(narrow(to), boolean(a), columns, [](uint8_t x) -> int32_t { return x; });
        return map(integer(to), boolean(a), columns, [](uint8_t x) -> int64_t { return x; });
      case Op::kSelect:
        return choose(boolean(to), boolean(a), boolean(b), boolean(c), columns);
      default:
        return run_boolean(instruction.op, boolean(to), boolean(a), boolean(b), columns);
    }
  }

  // Only the integer ones among `to`, a, b, c are used.
  template <class Integer>
  void run_integers(const Instruction& instruction, Integer* to, const Integer* a, const Integer* b, const Integer* c,
                    int64_t key, int columns) const {
    const int place = instruction.target.place;
    switch (instruction.op) {
      case Op::kKey:
        for (int i = 0; i < columns; ++i) to[i] = static_cast<Integer>(key + i);
        return;
      case Op::kToFloat:
        return convert_integers(real(place), a, columns);
      case Op::kToBool:
        return map(boolean(place), a, columns, [](Integer x) -> uint8_t { return x != 0; });
      case Op::kSelect:
        return choose(to, boolean(instruction.sources[0].wide), b, c, columns);
      case Op::kEqual:
      case Op::kNotEqual:
      case Op::kLess:
      case Op::kLessEqual:
        return run_comparison(instruction.op, boolean(place), a, b, columns);
      default:
        return run_integer(instruction.op, to, a, b, columns);
    }
  }
};

// Runs the plan over the tile; take(machine, row, first column, columns) sees the registers of each block of each row.
template <class Real, class Take>
KP_PRIMITIVE void run(const TilePlan& plan, const Tile& tile, const Real* scores, int64_t score_stride, void* workspace,
                      const Take& take) {
  const Machine<Real> machine(plan, tile, workspace);
  machine.run_scalars(TilePlan::kTile, 0);
  for (int64_t begin = 0; begin < tile.columns; begin += kTileBlock) {
    const int columns = static_cast<int>(tile.columns - begin < kTileBlock ? tile.columns - begin : kTileBlock);
    const int padded = static_cast<int>(round_up(columns, kStep));
    machine.run_blocks(TilePlan::kKey, tile.first_key + begin, padded);
    for (int64_t row = 0; row < tile.rows; ++row) {
      machine.run_scalars(TilePlan::kRow, tile.first_query + row);
      if (plan.score_register() >= 0) {
        Real* register_of_scores = machine.real(plan.score_register());
        std::memcpy(register_of_scores, scores + row * score_stride + begin, columns * sizeof(Real));
        for (int i = columns; i < padded; ++i) register_of_scores[i] = 0;
      }
      machine.run_blocks(TilePlan::kElement, 0, padded);
      take(machine, row, begin, columns);
    }
  }
}

template <class Real>
void evaluate(const TilePlan& plan, const Tile& tile, const Real* scores, int64_t score_stride,
              std::span<const Rows> results, void* workspace) {
  const auto write = [&](const Machine<Real>& machine, int64_t row, int64_t begin, int columns) {
    for (size_t i = 0; i < results.size(); ++i) {
      const TilePlan::Result& result = plan.results()[i];
      const int64_t offset = row * results[i].stride + begin;
      if (result.type == Type::kFloat) {
        std::memcpy(static_cast<Real*>(results[i].data) + offset, machine.real(result.slot.wide),
                    columns * sizeof(Real));
      } else if (result.type == Type::kInt) {
        std::memcpy(static_cast<int64_t*>(results[i].data) + offset, machine.integer(result.slot.wide),
                    columns * sizeof(int64_t));
      } else {
        std::memcpy(static_cast<uint8_t*>(results[i].data) + offset, machine.boolean(result.slot.wide), columns);
      }
    }
  };
  run(plan, tile, scores, score_stride, workspace, write);
}

template <class Real>
KP_PRIMITIVE void add(const CaptureGradient<Real>& gradient, int64_t offset, Real value) {
  Real* place = gradient.data + offset;
  if (!gradient.is_shared) {
    *place += value;
    return;
  }
  Real before;
  __atomic_load(place, &before, __ATOMIC_RELAXED);
  for (Real after = before + value;
       !__atomic_compare_exchange(place, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {
    after = before + value;
  }
}

// Elements that a whole row reads alike are summed before they are added.
template <class Real>
KP_PRIMITIVE void add_load(const Machine<Real>& machine, const LoadGradient& load, const Real* grad, int columns,
                           const CaptureGradient<Real>& gradient) {
  const TensorView& from = machine.plan.captured()[load.capture];
  const Real* derivative = machine.real(machine.plan.results()[load.derivative].slot.wide);
  const auto offset_of = [&](int column) {
    int64_t offset = 0;
    for (int i = 0; i < from.rank; ++i) {
      const int64_t index = machine.integer(machine.plan.results()[load.indices + i].slot.wide)[column];
      offset = offset * from.sizes[i] + place_of(index, from.sizes[i]);
    }
    return offset;
  };
  if ((load.index_varies & (kVariesByKey | kVariesByScore)) == 0) {
    Real sum = 0;
    for (int i = 0; i < columns; ++i) sum += grad[i] * derivative[i];
    return add(gradient, offset_of(0), sum);
  }
  for (int i = 0; i < columns; ++i) {
    const Real value = grad[i] * derivative[i];
    if (value != 0) add(gradient, offset_of(i), value);
  }
}

template <class Real>
void backward(const TilePlan& plan, std::span<const LoadGradient> loads, const Tile& tile, const Real* scores,
              int64_t score_stride, Real* grad, int64_t grad_stride, std::span<const CaptureGradient<Real>> gradients,
              void* workspace) {
  const auto take = [&](const Machine<Real>& machine, int64_t row, int64_t begin, int columns) {
    Real* row_grad = grad + row * grad_stride + begin;
    for (const LoadGradient& load : loads) {
      const bool is_wanted = !gradients.empty() && gradients[load.capture].data != nullptr;
      if (is_wanted) add_load(machine, load, row_grad, columns, gradients[load.capture]);
    }
    const Real* derivative = machine.real(plan.results()[0].slot.wide);
    for (int i = 0; i < columns; ++i) row_grad[i] *= derivative[i];
  };
  run(plan, tile, scores, score_stride, workspace, take);
}

}  // namespace

extern const TileKernels<float> kTileKernels = {evaluate<float>, backward<float>};
extern const TileKernels<double> kTileKernelsDouble = {evaluate<double>, backward<double>};

}  // namespace kernel_pytorch::expression::KP_ISA_NAMESPACE
