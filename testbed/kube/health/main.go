// health is a gRPC server with the health service, for tests of gRPC probes: it
// serves at the address of its first argument as long as the file of its second
// is there, and says that it does not otherwise.
package main

import (
	"log"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	pb "google.golang.org/grpc/health/grpc_health_v1"
)

func main() {
	l, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	h := health.NewServer()
	go func() {
		for ; ; time.Sleep(50 * time.Millisecond) {
			state := pb.HealthCheckResponse_NOT_SERVING
			if _, err := os.Stat(os.Args[2]); err == nil {
				state = pb.HealthCheckResponse_SERVING
			}
			h.SetServingStatus("", state)
		}
	}()
	s := grpc.NewServer()
	pb.RegisterHealthServer(s, h)
	log.Fatal(s.Serve(l))
}
