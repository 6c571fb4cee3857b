// Leg is one request's transfer.
package connector
