// When the last of some blocks is done, where each takes the next of these costs as it comes free.
#pragma once

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

inline double makespan(const std::vector<double>& costs, int blocks) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free{std::greater<>(), std::vector<double>(blocks)};
  double last = 0;
  for (const double cost : costs) {
    const double end = free.top() + cost;
    free.pop();
    free.push(end);
    last = std::max(last, end);
  }
  return last;
}
