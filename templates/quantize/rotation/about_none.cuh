//   out = e4m3(in / descale),   descale = max |in| / 448
