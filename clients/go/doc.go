// Package gateway is a client of mqtt-server's gRPC API: publishing with an outcome, consuming with acknowledgement, commands, latest
// values, shadows and devices. Client.Stubs has every other method.
//
// A Client may be used by any number of goroutines. Calls without a deadline of their context get that of Options.Timeout.
package gateway
