//   in becomes in after a rotary embedding of columns half a row apart, rounded to its dtype, and then
//
