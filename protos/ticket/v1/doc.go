// Package ticketv1 is the plaintext of a ticket as a protobuf message: two releases of Tandem must agree on it when
// they meet in one request. The product's codec is hand-written (extproc/kvtransfer); its tests compare it with this
// generated twin (scripts/generate.sh), which other programs would use.
package ticketv1
