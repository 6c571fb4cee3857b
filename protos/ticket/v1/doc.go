// Package ticketv1 is the plaintext of a ticket as a protobuf message: what two releases of Tandem must agree on when they
// meet in one request. The product writes and reads it by hand (extproc/kvtransfer); this generated twin (scripts/generate.sh)
// is what its tests hold it against, and what other programs would use.
package ticketv1
