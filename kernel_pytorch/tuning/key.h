// The key of a measurement. An op describes its problem once, field by field, already bucketed; a warm call only hashes
// the fields, everything else (the store, explain, export) also wants their text.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernel_pytorch/base/dtype.h"
#include "kernel_pytorch/base/hash.h"
#include "kernel_pytorch/base/tensor_view.h"

namespace kernel_pytorch::tuning {

// The name of a field is a literal, hashed by the compiler. It holds none of the characters that separate fields.
struct FieldName {
  // A name with its hash_text, of a list of fields.
  constexpr FieldName(std::string_view name, uint64_t name_hash) : text(name), hash(name_hash) {}
  consteval FieldName(const char* name) : text(name), hash(hash_text(name)) {
    if (text.empty() || text.find_first_of("= ") != std::string_view::npos) throw "a field's name is one word";
  }
  std::string_view text;
  uint64_t hash;
};

// An op adds the same fields in the same order for each of its problems (ops/tuning_keys_test.cpp). The hash covers
// names and values, so equal hashes mean equal texts.
class KeyBuilder {
 public:
  // With `text`, also writes "name=value name=value".
  explicit KeyBuilder(std::string* text = nullptr) : text_(text) {}

  void field(FieldName name, int64_t value) {
    mixer_.add(name.hash ^ static_cast<uint64_t>(value));
    if (text_ != nullptr) write(name, std::to_string(value));
  }
  // The rotation keeps a type and a number of the same field apart, as their texts are.
  void field(FieldName name, DType value) {
    mixer_.add(std::rotl(name.hash, 32) ^ static_cast<uint64_t>(value));
    if (text_ != nullptr) write(name, name_of(value));
  }
  // An optional tensor: its type, or "none".
  void field(FieldName name, const TensorView& tensor) {
    if (tensor.is_present()) return field(name, tensor.dtype);
    mixer_.add(std::rotl(name.hash, 16));
    if (text_ != nullptr) write(name, "none");
  }
  uint64_t hash() const { return mixer_.value(); }

 private:
  void write(FieldName name, std::string_view value) {
    if (!text_->empty()) text_->push_back(' ');
    text_->append(name.text).append("=").append(value);
  }
  HashMixer mixer_;
  std::string* text_;
};

// Sizes that behave alike share a measurement: exact up to 16, then the next of 4 steps per power of two.
constexpr int64_t bucket(int64_t size) {
  if (size <= 16) return size;
  int64_t power = 16;
  while (power * 2 <= size) power *= 2;
  const int64_t step = power / 4;
  return (size + step - 1) / step * step;
}

struct Key {
  std::string device;      // DeviceInfo::fingerprint
  std::string op;          // "rms_norm_forward"
  std::string kernel_set;  // hex: names and source hashes of the op's kernels, NVRTC's and vendor libraries' versions
  std::string problem;     // "rows=1024 columns=4096 dtype=bf16"
  friend auto operator<=>(const Key&, const Key&) = default;
};

}  // namespace kernel_pytorch::tuning
