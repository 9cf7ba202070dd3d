//   in becomes in after a rotary embedding of neighbouring columns, rounded to its dtype, and then
//
