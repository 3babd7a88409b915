// gelu where a table of sixteen (AVX-512) or eight (AVX2) fits a register: half the instructions of a formula with an
// exponential.
//
//   gelu(x) = max(x, 0) - deficit(|x|),  deficit(a) = a cdf(-a)
//   gelu'(x) = slope(|x|) for x < 0, 1 - slope(|x|) otherwise,  slope(a) = cdf(-a) - a density(a)
//
// Both are polynomials of degree five on sixteen steps of 1 / 2.59, fits of ours; the deficit is zero from 5.6 on, the
// slope a line to zero at 5.8. gelu is within 3e-5 of its value out to there, and 6e-8 in its middle; the slope is
// within 4e-8 below 5.6 and 1.3e-7 from there on. With eight steps of 1 / 1.293 the degree is seven, and both are zero
// from 5.8 on: gelu is within 3e-5 of its value to 5.6 and 2e-4 to 5.8, and 3e-8 in its middle; the slope is within
// 4e-8.
#pragma once

#include "kernel_pytorch/cpu/vec.h"

#if defined(__AVX512F__)
namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {

inline constexpr float kGeluSteps = 2.59f;

// Coefficients by power, then by step.
alignas(64) constexpr float kDeficit[6][16] = {
    {0.0f, 0.135023609f, 0.169882447f, 0.142900288f, 0.0945877135f, 0.0516840443f, 0.0237745941f, 0.00929435156f,
     0.00310369837f, 0.000887902163f, 0.00021799645f, 4.59858747e-05f, 8.34092953e-06f, 1.30148692e-06f,
     1.74764921e-07f, 0.0f},
    {0.193050191f, 0.0798235834f, -0.0033376764f, -0.0435873158f, -0.048536256f, -0.0357958004f, -0.0204218253f,
     -0.00946753751f, -0.00364536233f, -0.00117928186f, -0.000322723179f, -7.5036296e-05f, -1.48669942e-05f,
     -2.51531947e-06f, -3.63954655e-07f, 0.0f},
    {-0.0594715215f, -0.051084999f, -0.0309797358f, -0.0100098085f, 0.00347489864f, 0.00796633679f, 0.00684130657f,
     0.00409051124f, 0.00190094206f, 0.000715284667f, 0.000222328628f, 5.77389364e-05f, 1.26186214e-05f,
     2.33196738e-06f, 3.65668825e-07f, 0.0f},
    {-3.26883719e-06f, 0.00528070377f, 0.0074652303f, 0.00602466799f, 0.00289593916f, 0.000313193596f, -0.000827739015f,
     -0.000886174326f, -0.00055518205f, -0.000256405125f, -9.33956399e-05f, -2.76486426e-05f, -6.76178161e-06f,
     -1.37988263e-06f, -2.36545702e-07f, 0.0f},
    {0.00149572734f, 0.00101446384f, 5.32805898e-05f, -0.00066992105f, -0.000779984402f, -0.000469672901f,
     -0.000122627273f, 5.77157625e-05f, 8.77510247e-05f, 5.76105085e-05f, 2.62709818e-05f, 9.20911043e-06f,
     2.58488421e-06f, 5.93367247e-07f, 1.12809694e-07f, 0.0f},
    {-4.12055197e-05f, -0.000164071433f, -0.000191130646f, -8.42364389e-05f, 3.39779835e-05f, 7.70447077e-05f,
     5.44171053e-05f, 1.75480563e-05f, -3.10848645e-06f, -7.23940639e-06f, -4.76941477e-06f, -2.07343169e-06f,
     -6.78400511e-07f, -1.75507097e-07f, -3.68051545e-08f, 0.0f},
};

alignas(64) constexpr float kSlope[6][16] = {
    {0.5f, 0.206743002f, -0.00864457805f, -0.11289119f, -0.125708953f, -0.0927111283f, -0.0528924949f, -0.0245208889f,
     -0.00944147352f, -0.0030543406f, -0.000835857703f, -0.000194347405f, -3.85070452e-05f, -6.51518303e-06f,
     -9.42772374e-07f, 0.0f},
    {-0.308063537f, -0.264623582f, -0.160473332f, -0.0518467464f, 0.0180026013f, 0.0412657186f, 0.0354368761f,
     0.0211879499f, 0.00984655693f, 0.00370518654f, 0.00115174672f, 0.000299142732f, 6.53869211e-05f, 1.20863488e-05f,
     1.89575303e-06f, 6.8e-07f},
    {-4.84157113e-07f, 0.0410345905f, 0.0580046773f, 0.0468137264f, 0.0225038137f, 0.00243381015f, -0.00643314235f,
     -0.00688718632f, -0.00431444217f, -0.00199223799f, -0.000725452148f, -0.000214660409f, -5.24621973e-05f,
     -1.06961525e-05f, -1.83136069e-06f, 0.0f},
    {0.0153118707f, 0.0105803693f, 0.000516010565f, -0.00702700205f, -0.008136902f, -0.00486793416f, -0.00124654372f,
     0.000617713144f, 0.000916241901f, 0.000596524042f, 0.000270218501f, 9.41215258e-05f, 2.62473113e-05f,
     5.98442148e-06f, 1.12968542e-06f, 0.0f},
    {-1.30368298e-05f, -0.00214341492f, -0.00247425912f, -0.00110180012f, 0.000427395018f, 0.000996185001f,
     0.000713330985f, 0.000235895292f, -3.66177883e-05f, -9.39229212e-05f, -6.30220093e-05f, -2.77717991e-05f,
     -9.20384446e-06f, -2.41237353e-06f, -5.1282683e-07f, 0.0f},
    {-0.0004961628f, -0.000282009656f, 0.000143697907f, 0.000346450863f, 0.000225592914f, 8.67925701e-06f,
     -9.69843531e-05f, -8.05821837e-05f, -2.91806955e-05f, 1.43918987e-06f, 8.15563908e-06f, 5.40910014e-06f,
     2.25797999e-06f, 6.97440896e-07f, 1.68780943e-07f, 0.0f},
};

// For results of 8 bits degree three is enough, in powers of a itself, which saves finding its place in the step:
// within 2^-11.3 of the value and 1.6e-7.
alignas(64) constexpr float kRoughDeficit[4][16] = {
    {0.0f, -0.000793871586f, -0.00649984553f, 0.0209252555f, 0.158229023f, 0.389164805f, 0.568650782f, 0.575829625f,
     0.433588266f, 0.252648681f, 0.116934799f, 0.0439672731f, 0.013772198f, 0.00359151838f, 0.000768352591f, 0.0f},
    {0.50001651f, 0.509991348f, 0.542094529f, 0.462596625f, 0.161752626f, -0.237386793f, -0.493989736f, -0.505391359f,
     -0.359389812f, -0.194243833f, -0.0830942988f, -0.0289272778f, -0.00842317939f, -0.00204934599f, -0.000410178851f,
     0.0f},
    {-0.400381595f, -0.444291413f, -0.505456209f, -0.428552151f, -0.208125517f, 0.0222904906f, 0.144719154f,
     0.150388017f, 0.100400791f, 0.0501286089f, 0.0197713189f, 0.00636315951f, 0.00172080123f, 0.000390363421f,
     7.30672982e-05f, 0.0f},
    {0.0194168072f, 0.0891931951f, 0.128516838f, 0.103681482f, 0.0496704951f, 0.00524352444f, -0.0142493993f,
     -0.0151522169f, -0.00944354013f, -0.00433952082f, -0.00157456147f, -0.000467859703f, -0.000117407944f,
     -2.48195593e-05f, -4.34289859e-06f, 0.0f},
};

// kPlaced: the powers are of the place in the step, in steps; otherwise of a.
template <bool kPlaced, int kCoefficients>
KP_PRIMITIVE cpu::Vec piecewise(const float (&table)[kCoefficients][16], cpu::Vec magnitude) {
  using cpu::Vec;
  constexpr float kRounder = 12582912.0f;  // adding it leaves a whole number in the lowest bits
  const Vec a = cpu::min(cpu::broadcast(15.0f / kGeluSteps), magnitude);  // in this order a NaN is handed on
  const Vec rounded = a * kGeluSteps + kRounder;
  const Vec variable = kPlaced ? a * kGeluSteps - (rounded - kRounder) : a;
  const auto coefficients = [&](int power) {  // the instruction looks at the lowest four bits alone
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(rounded), _mm512_load_ps(table[power])));
  };
  Vec sum = coefficients(kCoefficients - 1);
  for (int power = kCoefficients - 2; power >= 0; --power) sum = sum * variable + coefficients(power);
  return sum;
}

// Half of x + |x| is max(x, 0), and NaN of minus infinity, as torch has it.
template <int kBits>
KP_PRIMITIVE cpu::Vec table_gelu(cpu::Vec x) {
  const cpu::Vec a = cpu::abs(x);
  if constexpr (kBits == 8) return 0.5f * (x + a) - piecewise<false>(kRoughDeficit, a);
  return 0.5f * (x + a) - piecewise<true>(kDeficit, a);
}
KP_PRIMITIVE cpu::Vec table_gelu_slope(cpu::Vec x) {
  const cpu::Vec slope = piecewise<true>(kSlope, cpu::abs(x));
  return cpu::select(x < 0.0f, slope, 1.0f - slope);
}

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
#elif defined(__AVX2__)
namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE {

inline constexpr float kGeluSteps = 1.293f, kGeluEnd = 5.8f;

// Coefficients by power of the place in the step, in steps, then by step.
alignas(32) constexpr float kDeficit[8][8] = {
    {0.0f, 0.16987182f, 0.094287544f, 0.023585659f, 0.0030588815f, 0.00021305736f, 8.069233e-06f, 1.6704692e-07f},
    {0.3866976f, -0.0070691975f, -0.09713588f, -0.04065289f, -0.0072082677f, -0.0006328029f, -2.88565e-05f,
     -6.9803826e-07f},
    {-0.23862343f, -0.12402357f, 0.014159521f, 0.02735648f, 0.0075446665f, 0.00087489415f, 4.9160448e-05f,
     1.4084452e-06f},
    {8.7897956e-07f, 0.060006034f, 0.023120224f, -0.006689687f, -0.0044275112f, -0.0007375581f, -5.2777454e-05f,
     -1.8208964e-06f},
    {0.023777993f, 0.00075924053f, -0.01262564f, -0.0018983418f, 0.0014211138f, 0.0004140162f, 3.9736617e-05f,
     1.6838675e-06f},
    {5.8827078e-05f, -0.0062105064f, 0.0011145229f, 0.0017671455f, -0.00010147595f, -0.00015503711f, -2.2133358e-05f,
     -1.196924e-06f},
    {-0.0023070336f, 0.0005763066f, 0.00092321745f, -0.0003922843f, -0.00012118177f, 3.3138873e-05f, 9.330768e-06f,
     7.1019025e-07f},
    {0.00025487522f, 0.00042828562f, -0.0002534629f, -3.1490992e-05f, 5.0310813e-05f, -1.0151296e-06f, -2.5287968e-06f,
     -2.923573e-07f},
};

alignas(32) constexpr float kSlope[8][8] = {
    {0.5f, -0.009140479f, -0.1255967f, -0.05256417f, -0.0093202945f, -0.0008182156f, -3.731112e-05f, -9.025492e-07f},
    {-0.6170801f, -0.32072416f, 0.036616784f, 0.07074355f, 0.019510558f, 0.0022624857f, 0.00012712786f, 3.6415915e-06f},
    {3.7572744e-07f, 0.23276387f, 0.08968417f, -0.025950946f, -0.017173871f, -0.0028608297f, -0.00020476294f,
     -7.06543e-06f},
    {0.12302797f, 0.0038953621f, -0.06531035f, -0.009804847f, 0.0073474827f, 0.002140677f, 0.00020562863f,
     8.739664e-06f},
    {3.932671e-05f, -0.04015556f, 0.0071945917f, 0.011447046f, -0.0006622346f, -0.0010046045f, -0.00014250417f,
     -7.701867e-06f},
    {-0.016708925f, 0.0047689923f, 0.0072644837f, -0.003180259f, -0.00091259583f, 0.00026462247f, 7.0826856e-05f,
     5.1758834e-06f},
    {0.00030666395f, 0.0038876366f, -0.0022598722f, -0.0003577814f, 0.00047577315f, -1.465035e-06f, -2.4916746e-05f,
     -2.7786923e-06f},
    {0.0012959563f, -0.0007863179f, -0.00027416568f, 0.00038142895f, -7.9989884e-05f, -2.3351331e-05f, 5.1822954e-06f,
     9.746052e-07f},
};

KP_PRIMITIVE cpu::Vec piecewise(const float (&table)[8][8], cpu::Vec magnitude) {
  using cpu::Vec;
  constexpr float kRounder = 12582912.0f;  // adding it leaves a whole number in the lowest bits
  const Vec rounded = magnitude * kGeluSteps + kRounder;
  const Vec place = magnitude * kGeluSteps - (rounded - kRounder);
  const auto coefficients = [&](int power) {  // the instruction looks at the lowest three bits alone
    return reinterpret_cast<Vec>(
        _mm256_permutevar8x32_ps(_mm256_load_ps(table[power]), reinterpret_cast<__m256i>(rounded)));
  };
  Vec sum = coefficients(7);
  for (int power = 6; power >= 0; --power) sum = sum * place + coefficients(power);
  return cpu::select(magnitude >= kGeluEnd, Vec{}, sum);  // a NaN is handed on
}

template <int>
KP_PRIMITIVE cpu::Vec table_gelu(cpu::Vec x) {
  const cpu::Vec a = cpu::abs(x);
  return 0.5f * (x + a) - piecewise(kDeficit, a);
}
KP_PRIMITIVE cpu::Vec table_gelu_slope(cpu::Vec x) {
  const cpu::Vec slope = piecewise(kSlope, cpu::abs(x));
  return cpu::select(x < 0.0f, slope, 1.0f - slope);
}

}  // namespace kernel_pytorch::pointwise::KP_ISA_NAMESPACE
#endif
