#include "cuda.h"

#include <set>

#include "../support/check.h"
#include EXERCISES

bool finds_maximum() {
  std::vector<float> values = check::numbers(64), result(64);
  for (float& value : values) value -= 3;
  values[37] = -0.5f;
  on_cpu::launch(1, 1, 64, [&] { result[threadIdx.x] = warp_maximum(values[threadIdx.x]); });
  float first = values[0];
  for (int i = 1; i < 32; ++i) first = std::fmax(first, values[i]);
  for (int i = 0; i < 64; ++i) {
    if (result[i] != (i < 32 ? first : -0.5f)) return false;
  }
  return true;
}

bool copies() {
  for (int count : {1, 4, 7, 130, 1023}) {
    alignas(16) static float from[1024], to[1024];
    for (int i = 0; i < 1024; ++i) from[i] = i + 1, to[i] = 0;
    on_cpu::launch(1, 1, 32, [&] { copy(from, to, count); });
    for (int i = 0; i < 1024; ++i) {
      if (to[i] != (i < count ? from[i] : 0)) return false;
    }
  }
  return true;
}

bool avoids_banks() {
  const int distance = row_distance();
  std::set<int> of_column, of_row;
  for (int lane = 0; lane < 32; ++lane) of_column.insert(lane * distance % 32), of_row.insert(lane % 32);
  return distance >= 32 && distance < 40 && of_column.size() == 32 && of_row.size() == 32;
}

int main() {
  check::exercise(1, "a maximum by shuffles", finds_maximum(), "__shfl_xor_sync(0xffffffff, value, 16), 8, 4, 2, 1");
  check::exercise(2, "wide copies", copies(), "count / 4 accesses of uint4, then the rest");
  check::exercise(3, "banks", avoids_banks(), "the bank of row r, column c is (r * distance + c) % 32");
  return check::result();
}
