// SPDX-License-Identifier: Apache-2.0

// A gRPC server that answers with its name, and a client that balances its requests over the members of an xDS server.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	_ "google.golang.org/grpc/xds"
)

// The response header with the server's name.
const nameHeader = "server-name"

// The time between two requests of the client.
const pace = 5 * time.Millisecond

type server struct {
	grpc_health_v1.UnimplementedHealthServer
	name string
}

func (s server) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if err := grpc.SetHeader(ctx, metadata.Pairs(nameHeader, s.name)); err != nil {
		return nil, err
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func serve(name, address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(s, server{name: name})
	return s.Serve(listener)
}

// Prints one line for each request: the name of the server, or the error.
func ask(target string) error {
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	client := grpc_health_v1.NewHealthClient(connection)
	for {
		var header metadata.MD
		deadline, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		_, err := client.Check(deadline, &grpc_health_v1.HealthCheckRequest{}, grpc.Header(&header), grpc.WaitForReady(true))
		cancel()
		if err != nil {
			fmt.Printf("error: %v\n", err)
		} else {
			fmt.Printf("%s\n", header.Get(nameHeader)[0])
		}
		time.Sleep(pace)
	}
}

func main() {
	var err error
	switch {
	case len(os.Args) == 4 && os.Args[1] == "serve":
		err = serve(os.Args[2], os.Args[3])
	case len(os.Args) == 3 && os.Args[1] == "ask":
		err = ask(os.Args[2])
	default:
		log.Fatalf("usage: %s serve NAME ADDRESS | ask TARGET", os.Args[0])
	}
	log.Fatal(err)
}
