// Content hashes. Fnv128 names cached files and source texts; HashMixer is the cheap 64-bit hash of a warm call's key.
// Neither is meant to resist an attacker: what they name lives in the user's own private cache.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kernel_pytorch {

// FNV-1a with 128 bits. Feed a length or a separator between variable-length parts.
class Fnv128 {
 public:
  constexpr Fnv128& add(std::string_view bytes) {
    for (char byte : bytes) {
      state_ ^= static_cast<unsigned char>(byte);
      state_ *= kPrime;
    }
    return *this;
  }
  constexpr Fnv128& add_part(std::string_view bytes) { return add_number(bytes.size()).add(bytes); }
  constexpr Fnv128& add_number(uint64_t number) {
    for (int i = 0; i < 8; ++i, number >>= 8) {
      state_ ^= number & 0xff;
      state_ *= kPrime;
    }
    return *this;
  }
  constexpr uint64_t low64() const { return static_cast<uint64_t>(state_) ^ static_cast<uint64_t>(state_ >> 64); }
  std::string hex() const {  // 32 digits
    std::string text(32, '0');
    unsigned __int128 rest = state_;
    for (int i = 31; i >= 0; --i, rest >>= 4) text[i] = "0123456789abcdef"[static_cast<int>(rest & 15)];
    return text;
  }

 private:
  using Word = unsigned __int128;
  static constexpr Word kPrime = (Word{1} << 88) | 0x13b;
  Word state_ = (Word{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;
};

constexpr uint64_t hash_text(std::string_view text) {
  return Fnv128().add(text).low64();
}

// One multiply per field. The order of fields is part of the hash.
class HashMixer {
 public:
  constexpr void add(uint64_t value) {
    state_ = (state_ ^ value) * 0x9e3779b97f4a7c15;
    state_ ^= state_ >> 32;
  }
  constexpr uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x51ed270b35ae1d6c;
};

}  // namespace kernel_pytorch
